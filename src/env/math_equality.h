// The verifier of mathematical answers: does the completion's final answer equal the problem's?
//
// Where the answer is looked for: the last of "\boxed{...}", else "<answer>...</answer>", else what follows
// "#### ", else "answer is" or "answer:"; else, unless a marker is required, the last formula between dollars
// or \( \), else the last number.
//
// When two answers are equal (math_expression.h says what is read):
//   - Literal numbers: as exact rationals (exact_number.h). 0.333 is not 1/3.
//   - Expressions without roots and functions of other than rational numbers: both sides are computed in two
//     prime fields of 61 bits, at random values of the variables, pi and e. Both agree only if the
//     difference is the zero of rational functions, but for a chance below 2^-90. The fields are drawn from
//     the text of both answers, so that nobody can write a number that is right by accident in them.
//   - Roots and functions: the same, each of them an unknown of its own, named by the value of its argument;
//     else, where the expressions are short (heights below), in 106-bit real arithmetic at random points, to
//     26 digits. Short means that no two different ones of such a length are known, or expected by
//     counting them, to be so near: e^(pi sqrt 163) is within 1e-30 of an integer, but has 18 digits.
//   - Sets and lists without order, tuples with it, intervals by ends and brackets, equations if one is the
//     other times a constant, inequalities as intervals.
//   - What is beyond these is unequal: a wrong answer is never called right to be kind.
// A percent sign on one side only: 50% equals 50 and 0.5.
//
// A completion without an answer that can be read is wrong (0). A reference that cannot be read is compared
// as text, without spaces and LaTeX dress, and the reward's message says so.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/settings.h"

namespace bough {

class RewardFunction;

struct MathVerifierOptions {
  bool require_marker = false;

  template <class V>
  void visit(V& v) {
    v("require_marker", require_marker,
      "an answer counts only in \\boxed, <answer>, after #### or 'the answer is'");
  }
};

struct MathComparison {
  bool equal = false;
  bool by_text = false;  // the reference could not be read
};

// Of two answers without the text around them. Bounded in time and memory, whatever they hold.
MathComparison compare_math(std::string_view answer, std::string_view reference);

// The final answer of a completion; empty: there is none.
std::string_view find_math_answer(std::string_view completion, bool require_marker);

// The reference of an answer field: what its last "####" or \boxed holds, else all of it.
std::string_view math_reference(std::string_view answer);

// 1 or 0. check() refuses problems without an answer.
std::unique_ptr<RewardFunction> make_math_reward(const MathVerifierOptions& options = {});

}  // namespace bough
