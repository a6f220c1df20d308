// Parses answers as people and models write them, LaTeX or plain, into trees.
//
// Supported: numbers (1,000; 1{,}000; .5; 2e3; 3 1/2; 50%), + - * / and implied products, powers, \frac,
// \sqrt[n], functions (sin .. arctan, ln, log_b, exp, sqrt, abs), factorials, binomials, pi, e, i, infinity,
// variables with subscripts, plus-minus; intervals, unions, tuples, sets, lists ("1, 2 or 3"), equations and
// chains of inequalities, matrices, texts. Units, \text after a value, dollars, degrees and spacing are
// dropped.
//
// The parser accepts at most kMaxExpressionText characters, kMaxExpressionDepth levels and
// kMaxExpressionNodes nodes.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bough {

inline constexpr size_t kMaxExpressionText = 4000;
inline constexpr int kMaxExpressionDepth = 60;
inline constexpr size_t kMaxExpressionNodes = 1000;

struct Expression {
  enum class Kind {
    kNumber,    // text: digits, point, exponent: "1200.5e3"
    kSymbol,    // text: a variable ("x", "x_1"), or pi, e, i
    kInfinity,  // minus infinity is kNegate of this
    kSum,       // of the children
    kProduct,   // of the children
    kQuotient,  // first child over second
    kNegate,
    kPower,      // first child to the power of the second
    kPlusMinus,  // plus or minus the child; sign -1: minus or plus
    kFunction,   // text: its name; children: its arguments (log: argument, base; root: argument, index).
                 // exp is a kPower of e
    kGroup,      // text: its two brackets, "()", "[)", ...; children: its items. (x) is parsed as x
    kSet,        // children: its items, unordered
    kUnion,      // of the children
    kRelation,   // text: operators, a character each (= < >, l: at most, g: at least); children: the sides
    kMatrix,     // `columns` children per matrix row
    kText,       // text: lower case, words with one space between them
  };
  Kind kind = Kind::kNumber;
  std::string text;
  std::vector<Expression> children;
  int sign = 1;
  size_t columns = 0;
  bool percent = false;  // the whole answer was a percentage; at the root only
};

// Returns nullopt if the text is not of this grammar or exceeds a bound.
std::optional<Expression> parse_expression(std::string_view text);

}  // namespace bough
