// Exact rational numbers as people and models write them: "1,000", "-3.50", "$12", "2e3", "3/4".
//
// A number is kept as decimal digits and a power of ten, never as a double: 0.1 + 0.2 style rounding can
// neither accept a wrong answer nor refuse a right one, and the time is linear in the text however hostile it
// is ("1e999999999" is four digits here, not a billion zeros).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace bough {

// (negative ? -1 : 1) * 0.d1 d2 d3 ... * 10^exponent, digits without leading or trailing zeros.
// Zero has no digits, exponent 0 and no sign, so that equal values are equal member by member.
struct Decimal {
  bool negative = false;
  std::string digits;
  int64_t exponent = 0;

  bool operator==(const Decimal&) const = default;
};

// numerator / denominator; the denominator is not zero.
struct ExactNumber {
  Decimal numerator;
  Decimal denominator{false, "1", 1};
};

bool operator==(const ExactNumber& a, const ExactNumber& b);

// Product of two decimals, exact: O(length x length), so callers bound the lengths.
Decimal multiply(const Decimal& a, const Decimal& b);

// Where a number stands in a text: [begin, begin + length). length 0: there is none.
struct NumberSpan {
  size_t begin = 0;
  size_t length = 0;
};

// The first number at or after `from`. What belongs to a number:
//   sign        '-', '+' or U+2212, unless what stands before makes it an operator ("7-5" holds 7 and 5)
//   currency    '$', '£' or '€' before or after the sign
//   digits      with complete groups of three after a comma: "1,000" is one number, "1,20" two
//   fraction    ".5", "3.14"; a period that no digit follows ends the sentence, not the number
//   exponent    "2e3", "1.5E-4"
//   quotient    "3/4", only where `quotients`
NumberSpan find_number(std::string_view text, size_t from, bool quotients);

// The value of a span that find_number returned. nullopt: a zero denominator, an exponent beyond 18 digits,
// or a quotient of parts longer than 1,000 digits (they are compared by multiplication).
std::optional<ExactNumber> parse_number(std::string_view span);

}  // namespace bough
