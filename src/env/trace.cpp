#include "env/trace.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_set>

#include "base/error.h"
#include "base/random.h"

namespace bough {

namespace {

constexpr int64_t kBase = 10;  // a register holds a digit
// Labels of the steps. They are neither digits nor names of registers, and appear nowhere else in a text.
constexpr std::string_view kLabels = "ABCDEFGHIJKLMNOPQRSTUVWXYZqrstuvwxyz!$%&()*,./:;<>?@[]^_{|}~";
static_assert(kLabels.size() == kTraceLabels);
constexpr uint64_t kMaxTraceAttempts = 20'000;
constexpr uint64_t kTraceDrawsPerAttempt = uint64_t{1} << 20;  // enough: 4 per step, 1 per register
constexpr uint64_t kOwn = uint64_t{1} << 60;                   // sequences of the slips' random numbers

struct TraceStep {
  int64_t target;
  char operation;   // '+', '-', or 'r': adds the register `operand`
  int64_t operand;  // a digit of 1 to 9, or another register
};

struct Program {
  size_t first = 0;  // the first step's label
  std::vector<int64_t> start;
  std::vector<TraceStep> steps;
};

char name_of(int64_t index) {
  return static_cast<char>('a' + index);
}

std::string text_of(const std::vector<int64_t>& registers) {
  std::string text;
  for (size_t i = 0; i < registers.size(); ++i) text += str(name_of(static_cast<int64_t>(i)), registers[i]);
  return text;
}

// For example "Bc+b".
std::string text_of(const TraceStep& step, size_t label) {
  if (step.operation == 'r') return str(kLabels[label], name_of(step.target), '+', name_of(step.operand));
  return str(kLabels[label], name_of(step.target), step.operation, step.operand);
}

// The amount that the step adds or subtracts.
int64_t amount_of(const TraceStep& step, const std::vector<int64_t>& registers) {
  return step.operation == 'r' ? registers[static_cast<size_t>(step.operand)] : step.operand;
}

Program draw_program(const CounterRandom& random, uint64_t sequence, uint64_t position,
                     const TraceSettings& settings) {
  const auto below = [&](int64_t bound) {
    return static_cast<int64_t>(random.below(static_cast<uint64_t>(bound), sequence, position++));
  };
  Program program;
  const int64_t num_steps = settings.min_steps + below(settings.max_steps - settings.min_steps + 1);
  program.first += static_cast<size_t>(below(settings.max_first));
  for (int64_t i = 0; i < settings.registers; ++i) program.start.push_back(below(kBase));
  for (int64_t i = 0; i < num_steps; ++i) {
    TraceStep step{below(settings.registers), '+', 0};
    if (random.uniform(sequence, position++) < settings.mixing) {
      step.operation = 'r';  // another register: adding a register to itself could not be undone
      step.operand = (step.target + 1 + below(settings.registers - 1)) % settings.registers;
    } else {
      if (below(2) == 1) step.operation = '-';
      step.operand = 1 + below(kBase - 1);
    }
    program.steps.push_back(step);
  }
  return program;
}

std::string question_of(const Program& program) {
  std::string text = text_of(program.start);
  for (size_t i = 0; i < program.steps.size(); ++i)
    text += " " + text_of(program.steps[i], program.first + i);
  return text;
}

std::string work_out(const Program& program, double slips, const CounterRandom& random, uint64_t sequence) {
  std::vector<int64_t> registers = program.start;
  std::string text;
  for (size_t i = 0; i < program.steps.size(); ++i) {
    const TraceStep& step = program.steps[i];
    const int64_t before = registers[static_cast<size_t>(step.target)], by = amount_of(step, registers);
    const bool subtracts = step.operation == '-';
    int64_t result = (before + (subtracts ? kBase - by : by)) % kBase;
    if (slips > 0 && random.uniform(kOwn + sequence, 2 * i) < slips)
      result =
          (result + 1 + static_cast<int64_t>(random.below(kBase - 1, kOwn + sequence, 2 * i + 1))) % kBase;
    registers[static_cast<size_t>(step.target)] = result;
    text += str(text_of(step, program.first + i), ' ', before, subtracts ? '-' : '+', by, '=', result, ' ',
                text_of(registers), '\n');
  }
  text += "#### ";
  for (const int64_t digit : registers) text += std::to_string(digit);
  return text;
}

}  // namespace

void TraceSettings::check() const {
  if (min_steps > max_steps)
    throw UserError(str("min_steps: got ", min_steps, ", expected at most max_steps, which is ", max_steps));
  if (max_first + max_steps - 1 > kTraceLabels)
    throw UserError(str("max_steps: got ", max_steps, " with max_first ", max_first, ", but there are ",
                        kTraceLabels, " labels; expected a sum of at most ", kTraceLabels + 1));
}

std::vector<Json> make_trace_problems(int64_t n, Split split, uint64_t seed, const TraceSettings& settings) {
  settings.check();
  const CounterRandom random(seed, Purpose::environment);
  std::vector<Json> problems;
  std::unordered_set<std::string> seen;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t sequence = (static_cast<uint64_t>(split) << 48) + static_cast<uint64_t>(i);
    for (uint64_t attempt = 0; std::ssize(problems) == i; ++attempt) {
      if (attempt == kMaxTraceAttempts)
        throw UserError(str("trace: only ", i, " of ", n, " different programs found with registers ",
                            settings.registers, " and max_steps ", settings.max_steps,
                            "; ask for fewer, or raise one of them"));
      const Program program = draw_program(random, sequence, attempt * kTraceDrawsPerAttempt, settings);
      std::string question = question_of(program);
      if (sums_split(question) != split || !seen.insert(question).second) continue;
      problems.push_back({{"question", std::move(question)},
                          {"answer", work_out(program, settings.slips, random, sequence)}});
    }
  }
  return problems;
}

}  // namespace bough
