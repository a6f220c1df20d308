// The verifier of mathematical answers: does the completion's final answer equal the problem's?
//
// The answer is the last occurrence of the first of these forms that the completion has: "\boxed{...}",
// "<answer>...</answer>", the text after "#### ", the text after "answer is" or "answer:". If no marker is
// required, two more forms follow: the last formula between dollars or \( \), then the last number.
//
// Rules of equality (math_expression.h lists the expressions that can be parsed):
//   - Literal numbers are compared as exact rationals (exact_number.h). 0.333 is not 1/3.
//   - Rational expressions are evaluated in two prime fields of 61 bits, at random values of the variables,
//     pi and e. Unequal expressions have equal values with probability below 2^-90. The fields are derived
//     from the text of both answers, so nobody can construct a wrong number that is equal in both fields.
//   - A root or a function without a rational value is an unknown in these fields, identified by the value of
//     its argument. If the two answers then differ in a field, short expressions are compared in 106-bit real
//     arithmetic, to 26 digits, at random values of the variables. Long expressions are not compared so,
//     because two different long ones can agree to 26 digits: e^(pi sqrt 163) agrees with an integer of 18
//     digits to a relative 3e-30. No such pair of short expressions is known, and there are too few short
//     expressions to expect one.
//   - Sets and lists are compared without order, tuples in order, intervals by ends and brackets.
//   - Equations are equal if one is the other times a constant. Inequalities are compared as intervals.
//   - Everything else is unequal, so that no wrong answer is accepted.
// If only one side has a percent sign, 50% equals both 50 and 0.5.
//
// A completion without a readable answer gets 0. A reference that cannot be parsed is compared as text,
// without spaces and LaTeX formatting, and the reward's message says so.
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
  bool by_text = false;  // compared as text, because the reference could not be parsed
};

// Compares two answers without surrounding text. Time and memory are bounded for any input.
MathComparison compare_math(std::string_view answer, std::string_view reference);

// Returns the final answer of a completion, or "" if there is none.
std::string_view find_math_answer(std::string_view completion, bool require_marker);

// Returns the reference in an answer field: the content of its last "####" or \boxed, else the whole field.
std::string_view math_reference(std::string_view answer);

// Rewards are 1 or 0. check() throws UserError for problems without an answer.
std::unique_ptr<RewardFunction> make_math_reward(const MathVerifierOptions& options = {});

}  // namespace bough
