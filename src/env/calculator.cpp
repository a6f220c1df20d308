#include "env/calculator.h"

#include <array>
#include <unordered_set>

#include "base/error.h"
#include "base/random.h"
#include "env/verifier.h"

namespace bough {

namespace {

constexpr std::string_view kOperations = "+-*";
constexpr const char* kSystem = "Work it out with calc, one operation a call. Then say the number.";

struct Chain {
  std::vector<int64_t> operands;
  std::string operations;  // one fewer than the operands

  std::string text() const {
    std::string out = std::to_string(operands[0]);
    for (size_t i = 0; i < operations.size(); ++i) out += str(operations[i], operands[i + 1]);
    return out;
  }
};

int64_t apply(int64_t a, char operation, int64_t b) {
  return operation == '+' ? a + b : operation == '-' ? a - b : a * b;
}

// No intermediate result is negative. Only the first operation may be a product, so results stay small.
Chain draw_chain(const CounterRandom& random, uint64_t sequence, uint64_t position,
                 const CalculatorSettings& settings) {
  const auto between = [&](int64_t low, int64_t high) {
    return low +
           static_cast<int64_t>(random.below(static_cast<uint64_t>(high - low + 1), sequence, position++));
  };
  Chain chain;
  const int64_t steps = between(settings.min_steps, settings.max_steps);
  int64_t value = between(settings.min_operand, settings.max_operand);
  chain.operands.push_back(value);
  for (int64_t i = 0; i < steps; ++i) {
    char operation = kOperations[static_cast<size_t>(between(0, i == 0 ? 2 : 1))];
    int64_t operand = between(settings.min_operand, settings.max_operand);
    if (operation == '-' && operand > value) operation = '+';
    value = apply(value, operation, operand);
    chain.operations += operation;
    chain.operands.push_back(operand);
  }
  return chain;
}

// The chains of the first n problems.
std::vector<Chain> make_chains(int64_t n, Split split, uint64_t seed, const CalculatorSettings& settings) {
  constexpr uint64_t kMaxAttempts = 20'000, kDrawsPerAttempt = 128;
  settings.check();
  const CounterRandom random(seed, Purpose::environment);
  std::vector<Chain> chains;
  std::unordered_set<std::string> seen;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t sequence = (static_cast<uint64_t>(split) << 48) + static_cast<uint64_t>(i);
    for (uint64_t attempt = 0; std::ssize(chains) == i; ++attempt) {
      if (attempt == kMaxAttempts)
        throw UserError(str("calculator: only ", i, " of ", n, " different problems found with max_operand ",
                            settings.max_operand, " and max_steps ", settings.max_steps,
                            "; ask for fewer, or raise one of them"));
      Chain chain = draw_chain(random, sequence, attempt * kDrawsPerAttempt, settings);
      const std::string text = chain.text();
      if (sums_split(text) == split && seen.insert(text).second) chains.push_back(std::move(chain));
    }
  }
  return chains;
}

std::string question_of(const Chain& chain) {
  return chain.text();
}

int64_t answer_of(const Chain& chain) {
  int64_t value = chain.operands[0];
  for (size_t i = 0; i < chain.operations.size(); ++i)
    value = apply(value, chain.operations[i], chain.operands[i + 1]);
  return value;
}

std::string call_text(int64_t a, char operation, int64_t b) {
  return str("<tool_call>\n{\"name\": \"calc\", \"arguments\": {\"a\": ", a, ", \"op\": \"", operation,
             "\", \"b\": ", b, "}}\n</tool_call>");
}

class Calculator final : public Episode {
 public:
  Observation reset(const Problem& problem, uint64_t seed) override {
    gold_ = verifier_.gold(problem.answer, problem.id);
    const std::string question = problem.fields.value("question", problem.prompt);
    Observation out;
    out.messages = {message_of("system", kSystem), message_of("user", question)};
    out.tools = {function_tool("calc", "One operation of two numbers",
                               {{"a", {{"type", "number"}}},
                                {"op", {{"type", "string"}, {"enum", {"+", "-", "*"}}}},
                                {"b", {{"type", "number"}}}})};
    return out;
  }

  Observation step(const Action& action) override {
    Observation out;
    for (const EnvironmentCall& call : action.calls) {
      const std::optional<int64_t> result = compute(call);
      out.invalid_calls += !result;
      out.messages.push_back(
          message_of("tool", result ? std::to_string(*result)
                                    : "error: expected whole numbers a and b, and op +, - or *"));
    }
    if (!action.calls.empty()) return out;
    out.done = true;
    out.reward = verifier_.verify(action.content, *gold_).score;
    return out;
  }

 private:
  static std::optional<int64_t> compute(const EnvironmentCall& call) {
    constexpr int64_t kLargest = 1'000'000'000;  // larger numbers are refused: a product of two fits int64_t
    const auto number = [&](const char* key) -> std::optional<int64_t> {
      const auto found = call.arguments.find(key);
      if (found == call.arguments.end() || !found->is_number_integer()) return std::nullopt;
      if (found->is_number_unsigned() && found->get<uint64_t>() > static_cast<uint64_t>(kLargest))
        return std::nullopt;
      const auto value = found->get<int64_t>();
      return value < -kLargest ? std::nullopt : std::optional(value);
    };
    const auto operation = call.arguments.find("op");
    const auto a = number("a"), b = number("b");
    if (call.name != "calc" || !a || !b || operation == call.arguments.end() || !operation->is_string())
      return std::nullopt;
    const auto& text = operation->get_ref<const std::string&>();
    if (text.size() != 1 || kOperations.find(text[0]) == std::string_view::npos) return std::nullopt;
    return apply(*a, text[0], *b);
  }

  NumberVerifier verifier_{VerifierSettings{}};
  std::optional<ExactNumber> gold_;
};

}  // namespace

void CalculatorSettings::check() const {
  if (min_operand > max_operand)
    throw UserError(
        str("min_operand: got ", min_operand, ", expected at most max_operand, which is ", max_operand));
  if (min_steps > max_steps)
    throw UserError(str("min_steps: got ", min_steps, ", expected at most max_steps, which is ", max_steps));
}

std::vector<Json> make_calculator_problems(int64_t n, Split split, uint64_t seed,
                                           const CalculatorSettings& settings) {
  std::vector<Json> problems;
  for (const Chain& chain : make_chains(n, split, seed, settings))
    problems.push_back({{"question", question_of(chain)}, {"answer", str(answer_of(chain))}});
  return problems;
}

std::vector<Json> make_calculator_traces(int64_t n, Split split, uint64_t seed,
                                         const CalculatorSettings& settings) {
  const CounterRandom random(seed, Purpose::environment);
  std::vector<Json> traces;
  uint64_t draw = 0;
  // Returns a slip: the amount by which a number is wrong on purpose, or 0. Slips use random numbers that the
  // problems do not use, so the problems do not depend on settings.slips.
  const auto slip = [&]() -> int64_t {
    constexpr uint64_t kOwn = uint64_t{1} << 61;
    if (random.uniform(kOwn, draw++) >= settings.slips) return 0;
    const auto size = 1 + static_cast<int64_t>(random.below(3, kOwn, draw++));
    return random.below(2, kOwn, draw++) ? size : -size;
  };
  for (const Chain& chain : make_chains(n, split, seed, settings)) {
    Json messages = {{{"role", "system"}, {"content", kSystem}},
                     {{"role", "user"}, {"content", question_of(chain)}}};
    const auto learn = [&](const std::string& content) {
      messages.push_back({{"role", "assistant"}, {"content", content}});
      traces.push_back({{"messages", messages}});
    };
    int64_t value = chain.operands[0];
    for (size_t i = 0; i < chain.operations.size(); ++i) {
      const int64_t operand = chain.operands[i + 1] + slip();
      learn(call_text(value, chain.operations[i], operand));
      value = apply(value, chain.operations[i], operand);
      messages.push_back({{"role", "tool"}, {"content", str(value)}});
    }
    learn(str(value));
  }
  return traces;
}

std::unique_ptr<Episode> make_calculator() {
  return std::make_unique<Calculator>();
}

}  // namespace bough
