// Exact rational numbers as people and models write them: "1,000", "-3.50", "$12", "2e3", "3/4".
//
// A number is stored as decimal digits and a power of ten, never as a double. So rounding can neither accept
// a wrong answer nor refuse a right one. Parsing takes time linear in the text, even for adversarial text:
// "1e999999999" is stored as one digit and an exponent, not as a billion zeros.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace bough {

// The value (negative ? -1 : 1) * 0.d1 d2 d3 ... * 10^exponent. `digits` has no leading or trailing zeros.
// Zero has no digits, exponent 0 and no sign. So equal values are equal member by member.
struct Decimal {
  bool negative = false;
  std::string digits;
  int64_t exponent = 0;

  bool operator==(const Decimal&) const = default;
};

// The value numerator / denominator. The denominator is not zero.
struct ExactNumber {
  Decimal numerator;
  Decimal denominator{false, "1", 1};
};

bool operator==(const ExactNumber& a, const ExactNumber& b);

// The exact product of two decimals. O(length x length), so callers must bound the lengths.
Decimal multiply(const Decimal& a, const Decimal& b);

// The position of a number in a text: [begin, begin + length). length 0: there is none.
struct NumberSpan {
  size_t begin = 0;
  size_t length = 0;
};

// Finds the first number at or after `from`. A number consists of:
//   sign        '-', '+' or U+2212, unless the text before it makes it an operator ("7-5" has 7 and 5)
//   currency    '$', '£' or '€' before or after the sign
//   digits      commas separate complete groups of three: "1,000" is one number, "1,20" is two
//   fraction    ".5", "3.14"; a period without a digit after it is the end of a sentence
//   exponent    "2e3", "1.5E-4"
//   quotient    "3/4", only if `quotients` is true
NumberSpan find_number(std::string_view text, size_t from, bool quotients);

// Returns the value of a span that find_number returned. nullopt if the denominator is zero, the exponent has
// more than 18 digits, or a part of a quotient has more than 1,000 digits (comparing multiplies the parts).
std::optional<ExactNumber> parse_number(std::string_view span);

}  // namespace bough
