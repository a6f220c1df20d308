// The task `calculator`: the model computes a chain of operations by tool calls and then answers.
//
//   user       7+5-3*2, from left to right
//   assistant  <tool_call>{"name": "calc", "arguments": {"a": 7, "op": "+", "b": 5}}</tool_call>
//   tool       12
//   ...
//   assistant  18
//
// Each call of the tool computes one operation on two numbers, so a chain of n operations needs n calls. The
// prompt of each turn is a prefix of the next turn's prompt. The turn without a call is the answer. The
// reward is 1 if the last number of this answer is right, else 0. No problem is in two splits (train, test,
// example), as in the task sums (sums.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/settings.h"
#include "env/environment.h"
#include "env/sums.h"

namespace bough {

struct CalculatorSettings {
  int64_t min_operand = 1;
  int64_t max_operand = 20;
  int64_t min_steps = 2;
  int64_t max_steps = 4;
  double slips = 0;

  template <class V>
  void visit(V& v) {
    v("min_operand", min_operand, "smallest number in a chain", range(0, 1'000'000));
    v("max_operand", max_operand, "largest number in a chain", range(1, 1'000'000));
    v("min_steps", min_steps, "fewest operations of a problem", range(1, 32));
    v("max_steps", max_steps,
      "most operations of a problem; the number is uniform from min_steps to max_steps", range(1, 32));
    v("slips", slips, "share of the turns of demonstrations that contain a wrong number", range(0.0, 1.0));
  }
  void check() const;
};

// Returns the first n problems of a split, all different, each a JSON object with question and answer. Throws
// UserError if the settings do not allow n different problems.
std::vector<Json> make_calculator_problems(int64_t n, Split split, uint64_t seed,
                                           const CalculatorSettings& settings);

// Demonstrations of the first n problems for `bough sft`: one object per turn of the assistant. `messages`
// ends with this turn, which is trained. Tool calls are part of the content, in the format of the hermes
// parser.
std::vector<Json> make_calculator_traces(int64_t n, Split split, uint64_t seed,
                                         const CalculatorSettings& settings);

std::unique_ptr<Episode> make_calculator();

}  // namespace bough
