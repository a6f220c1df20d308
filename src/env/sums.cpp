#include "env/sums.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <unordered_set>

#include "base/error.h"
#include "base/file.h"
#include "data/prompt_layout.h"

namespace bough {

namespace {

// The wording of a chain of operations. {things} is a number with the object ("1 fig", "7 figs"), {objects}
// is the object in the plural, {a} and {b} are the operands.
struct Wording {
  std::string_view start;           // the first number
  std::string_view start_multiply;  // the first two numbers if the first operation multiplies them
  std::string_view add;
  std::string_view subtract;
  std::string_view end;
};

constexpr std::array<Wording, 6> kWordings = {{
    {"{name} has {things}", "{name} has {a} bags of {b} {objects}", ", gets {b} more", ", loses {b}",
     ". How many {objects} now?"},
    {"{name} picks {things}", "{name} picks {b} {objects} on each of {a} days", ", then {b} more",
     ", then drops {b}", ". How many {objects}?"},
    {"A box holds {things}.", "{a} boxes hold {b} {objects} each.", " {name} adds {b}.", " {name} takes {b}.",
     " How many {objects} now?"},
    {"At home are {things}.", "At home are {a} bags of {b} {objects}.", " {name} brings {b}.",
     " {name} sells {b}.", " How many {objects}?"},
    {"{name}'s shop has {things}.", "{name}'s shop has {a} packs of {b} {objects}.", " It buys {b}.",
     " It sells {b}.", " How many {objects} now?"},
    {"{name} saves {things}.", "{name} saves {b} {objects} for {a} days.", " {name} wins {b}.",
     " {name} gives {b}.", " What is the total?"},
}};

// Names and objects are short, because every byte of a question is a token of a byte-level model.
constexpr std::array<std::string_view, 16> kNames = {"Tom", "Ann", "Sam", "Mia", "Leo", "Eva", "Max", "Zoe",
                                                     "Ben", "Ida", "Kim", "Ned", "Joy", "Ray", "Una", "Gus"};
constexpr std::array<std::string_view, 16> kObjects = {"figs", "pens",  "eggs",  "keys", "cups", "nuts",
                                                       "toys", "hats",  "caps",  "pins", "gems", "maps",
                                                       "tags", "beads", "bolts", "dates"};

// If the settings allow n problems, each is found within a few attempts. If they do not, the search must not
// loop for ever.
constexpr uint64_t kMaxSumAttempts = 20'000;
constexpr uint64_t kSumDrawsPerAttempt = 64;  // a chain of 8 steps needs 3 + 2 * 8 + 1

struct SumStep {
  char operation;  // '+', '-', '*'
  int64_t operand;
};

struct SumChain {
  int64_t first;
  std::vector<SumStep> steps;
};

void replace(std::string& text, std::string_view hole, std::string_view value) {
  for (size_t at = text.find(hole); at != std::string::npos; at = text.find(hole, at + value.size())) {
    text.replace(at, hole.size(), value);
  }
}

int64_t apply(int64_t value, const SumStep& step) {
  return step.operation == '+'   ? value + step.operand
         : step.operation == '-' ? value - step.operand
                                 : value * step.operand;
}

// The random numbers of one attempt at one problem.
class Draws {
 public:
  Draws(const CounterRandom& random, uint64_t sequence, uint64_t attempt)
      : random_(random), sequence_(sequence), position_(attempt * kSumDrawsPerAttempt) {}

  int64_t between(int64_t low, int64_t high) {
    return low +
           static_cast<int64_t>(random_.below(static_cast<uint64_t>(high - low + 1), sequence_, position_++));
  }
  template <class List>
  const auto& one_of(const List& list) {
    return list[static_cast<size_t>(between(0, static_cast<int64_t>(list.size()) - 1))];
  }

 private:
  const CounterRandom& random_;
  uint64_t sequence_;
  uint64_t position_;
};

// Draws a random chain of operations. nullopt if no operation is allowed at some step (the number is too
// small to subtract from) or a factor is 1.
std::optional<SumChain> draw_chain(Draws& draws, const SumsSettings& settings) {
  SumChain chain;
  const int64_t num_steps = draws.between(settings.min_steps, settings.max_steps);
  int64_t value = chain.first = draws.between(settings.min_operand, settings.max_operand);
  for (int64_t i = 0; i < num_steps; ++i) {
    std::vector<char> allowed;
    for (const std::string& operation : settings.operations) {
      if (operation == "add") allowed.push_back('+');
      if (operation == "subtract" && value >= settings.min_operand) allowed.push_back('-');
      if (operation == "multiply" && i == 0) allowed.push_back('*');
    }
    if (allowed.empty()) return std::nullopt;
    SumStep step{draws.one_of(allowed), 0};
    const int64_t highest =
        step.operation == '-' ? std::min(value, settings.max_operand) : settings.max_operand;
    step.operand = draws.between(settings.min_operand, highest);
    // "1 bags of 5 figs" and "1 figs" would be wrong: the wordings of products have plurals only.
    if (step.operation == '*' && (chain.first == 1 || step.operand == 1)) return std::nullopt;
    value = apply(value, step);
    chain.steps.push_back(step);
  }
  return chain;
}

std::string tell(const Wording& wording, const SumChain& chain, std::string_view name,
                 std::string_view objects) {
  const bool product = chain.steps[0].operation == '*';
  std::string text(product ? wording.start_multiply : wording.start);
  replace(text, "{a}", std::to_string(chain.first));
  replace(text, "{b}", std::to_string(chain.steps[0].operand));
  const std::string_view counted = chain.first == 1 ? objects.substr(0, objects.size() - 1) : objects;
  replace(text, "{things}", str(chain.first, " ", counted));
  for (size_t i = product ? 1 : 0; i < chain.steps.size(); ++i) {
    std::string clause(chain.steps[i].operation == '+' ? wording.add : wording.subtract);
    replace(clause, "{b}", std::to_string(chain.steps[i].operand));
    text += clause;
  }
  text += wording.end;
  replace(text, "{name}", name);
  replace(text, "{objects}", objects);
  return text;
}

// The worked solution. `slip`, an error made on purpose, is added to the last result, or subtracted if the
// result would be negative.
std::string work_out(const SumChain& chain, int64_t slip) {
  std::string text;
  int64_t value = chain.first;
  for (size_t i = 0; i < chain.steps.size(); ++i) {
    const SumStep& step = chain.steps[i];
    int64_t result = apply(value, step);
    if (i + 1 == chain.steps.size()) result += result + slip < 0 ? -slip : slip;
    text += str(value, step.operation, step.operand, "=", result, " ");
    value = result;
  }
  return text + str("#### ", value);
}

std::string skeleton_of(size_t wording, SumChain chain) {
  if (chain.steps[0].operation != '-' && chain.steps[0].operand < chain.first) {
    std::swap(chain.first, chain.steps[0].operand);
  }
  std::string text = str(wording, ":", chain.first);
  for (const SumStep& step : chain.steps) text += str(step.operation, step.operand);
  return text;
}

// The error in the worked solution of problem number `sequence`; 0 if the solution is right. It uses random
// numbers that the questions do not use, so the questions are the same for every `share` of errors.
int64_t draw_slip(const CounterRandom& random, uint64_t sequence, double share) {
  constexpr int64_t kLargest = 3;
  const uint64_t own = sequence + (uint64_t{1} << 60);
  if (random.uniform(own, 0) >= share) return 0;
  const int64_t size = 1 + static_cast<int64_t>(random.below(kLargest, own, 1));
  return random.below(2, own, 2) ? size : -size;
}

std::optional<SumsProblem> draw_problem(Draws draws, Split split, const SumsSettings& settings,
                                        int64_t slip) {
  const auto wording = static_cast<size_t>(draws.between(0, kWordings.size() - 1));
  const std::string_view name = draws.one_of(kNames);
  const std::string_view objects = draws.one_of(kObjects);
  const auto chain = draw_chain(draws, settings);
  if (!chain) return std::nullopt;
  SumsProblem problem;
  problem.skeleton = skeleton_of(wording, *chain);
  if (sums_split(problem.skeleton) != split) return std::nullopt;
  problem.question = tell(kWordings[wording], *chain, name, objects);
  problem.answer = work_out(*chain, slip);
  return problem;
}

}  // namespace

void SumsSettings::check() const {
  const auto ordered = [](const char* low_key, int64_t low, const char* high_key, int64_t high) {
    if (low > high)
      throw UserError(str(low_key, ": got ", low, ", expected at most ", high_key, ", which is ", high));
  };
  ordered("min_operand", min_operand, "max_operand", max_operand);
  ordered("min_steps", min_steps, "max_steps", max_steps);
  const auto is_multiply = [](const std::string& operation) { return operation == "multiply"; };
  if (operations.empty())
    throw UserError("operations: got an empty list, expected add, subtract or multiply in it");
  if (max_steps > 1 && std::all_of(operations.begin(), operations.end(), is_multiply)) {
    throw UserError(str("operations: multiply is for the first step only, and max_steps is ", max_steps,
                        "; add `add` or `subtract`, or set max_steps to 1"));
  }
}

Split sums_split(const std::string& skeleton) {
  const uint64_t bucket = stable_hash(skeleton.data(), skeleton.size()) % 50;
  return bucket < 10 ? Split::test : bucket == 10 ? Split::example : Split::train;
}

std::vector<SumsProblem> make_sums(int64_t n, Split split, uint64_t seed, const SumsSettings& settings) {
  settings.check();
  if (n < 0) throw UserError(str("number of problems: got ", n, ", expected at least 0"));
  const CounterRandom random(seed, Purpose::environment);
  std::vector<SumsProblem> problems;
  std::unordered_set<std::string> seen;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t sequence = (static_cast<uint64_t>(split) << 48) + static_cast<uint64_t>(i);
    const int64_t slip = draw_slip(random, sequence, settings.slips);
    for (uint64_t attempt = 0; problems.size() == static_cast<size_t>(i); ++attempt) {
      if (attempt == kMaxSumAttempts) {
        throw UserError(str("sums: only ", i, " of ", n, " different problems found with max_operand ",
                            settings.max_operand, " and max_steps ", settings.max_steps,
                            "; ask for fewer, or raise max_operand or max_steps"));
      }
      auto problem = draw_problem(Draws(random, sequence, attempt), split, settings, slip);
      if (problem && seen.insert(problem->question).second) problems.push_back(std::move(*problem));
    }
  }
  return problems;
}

void write_sums_dataset(const std::filesystem::path& path, int64_t n, Split split, uint64_t seed,
                        const SumsSettings& settings) {
  std::vector<WorkedExample> examples;
  for (const SumsProblem& example : make_sums(settings.shots, Split::example, seed, settings)) {
    examples.push_back({example.question, example.answer});
  }
  const PromptLayout layout;
  std::string lines;
  for (const SumsProblem& problem : make_sums(n, split, seed, settings)) {
    Json record = {{"question", problem.question}, {"answer", problem.answer}};
    if (!examples.empty())
      record["prompt"] = plain_prompt(examples, render_question(problem.question, layout), layout);
    lines += dump_line(record);
    lines += '\n';
  }
  write_file_atomically(path, lines);
}

}  // namespace bough
