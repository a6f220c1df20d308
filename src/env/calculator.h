// The task `calculator`: a chain of operations, each of which is a call of a tool, and an answer.
//
//   user       7+5-3*2, from left to right
//   assistant  <tool_call>{"name": "calc", "arguments": {"a": 7, "op": "+", "b": 5}}</tool_call>
//   tool       12
//   ...
//   assistant  18
//
// The tool takes one operation of two numbers a call, so that a chain of n operations needs n calls: turns
// whose prompts are each other's prefixes. The turn without a call is the answer: 1 where its last number is
// right, else 0. Splits are disjoint by construction, as those of the task sums are (sums.h).
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
    v("max_steps", max_steps, "most operations of a problem; uniform between the two", range(1, 32));
    v("slips", slips, "share of the turns of demonstrations that have a wrong number in them",
      range(0.0, 1.0));
  }
  void check() const;
};

// The first n problems of a split, no two alike, each a JSON object with question and answer. UserError where
// the settings do not allow so many.
std::vector<Json> make_calculator_problems(int64_t n, Split split, uint64_t seed,
                                           const CalculatorSettings& settings);

// Demonstrations of the problems for `bough sft`: an object a turn, with `messages` up to that turn, which is
// learned. Calls stand in the content as hermes writes them.
std::vector<Json> make_calculator_traces(int64_t n, Split split, uint64_t seed,
                                         const CalculatorSettings& settings);

std::unique_ptr<Episode> make_calculator();

}  // namespace bough
