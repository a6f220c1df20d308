#include "env/exact_number.h"

#include <algorithm>
#include <vector>

#include "base/ascii.h"

namespace bough {

namespace {

constexpr size_t kMaxQuotientDigits = 1000;  // comparing quotients takes an O(n^2) product: milliseconds
constexpr size_t kMaxExponentDigits = 18;    // surely fits int64_t, with room to add the number of digits

bool digit_at(std::string_view text, size_t i) {
  return i < text.size() && is_digit(text[i]);
}

// Length of the sign that begins at i, or 0.
size_t sign_length(std::string_view text, size_t i) {
  if (i < text.size() && (text[i] == '-' || text[i] == '+')) return 1;
  return text.substr(std::min(i, text.size()), 3) == "\xE2\x88\x92" ? 3 : 0;  // U+2212
}

// Length of the currency sign that begins at i, or 0.
size_t currency_length(std::string_view text, size_t i) {
  if (i >= text.size()) return 0;
  if (text[i] == '$') return 1;
  if (text.substr(i, 2) == "\xC2\xA3") return 2;       // pound
  return text.substr(i, 3) == "\xE2\x82\xAC" ? 3 : 0;  // euro
}

// After these characters a sign is an operator or a hyphen, not part of the number.
bool operand_before(std::string_view text, size_t i) {
  if (i == 0) return false;
  const char c = text[i - 1];
  return is_digit(c) || is_letter(c) || c == ')' || c == ']' || c == '}' || c == '%';
}

// End of the digits that begin at i, with commas between complete groups of three.
size_t skip_integer(std::string_view text, size_t i) {
  const size_t begin = i;
  while (digit_at(text, i)) ++i;
  if (i - begin > 3 || i == begin) return i;
  while (i < text.size() && text[i] == ',' && digit_at(text, i + 1) && digit_at(text, i + 2) &&
         digit_at(text, i + 3)) {
    if (digit_at(text, i + 4)) break;  // "1,0000": not a group of three
    i += 4;
  }
  return i;
}

// End of the unsigned decimal that begins at i. Returns i if there is none.
size_t skip_decimal(std::string_view text, size_t i) {
  const size_t begin = i;
  i = skip_integer(text, i);
  if (i < text.size() && text[i] == '.' && digit_at(text, i + 1)) {
    ++i;
    while (digit_at(text, i)) ++i;
  }
  if (i == begin) return begin;
  if (i < text.size() && (text[i] == 'e' || text[i] == 'E')) {
    const size_t digits = i + 1 + (i + 1 < text.size() && (text[i + 1] == '-' || text[i + 1] == '+') ? 1 : 0);
    if (digit_at(text, digits)) {
      i = digits;
      while (digit_at(text, i)) ++i;
    }
  }
  return i;
}

std::optional<int64_t> parse_exponent(std::string_view text) {
  bool negative = false;
  size_t i = 0;
  if (text[0] == '-' || text[0] == '+') negative = text[i++] == '-';
  while (i < text.size() && text[i] == '0') ++i;
  if (text.size() - i > kMaxExponentDigits) return std::nullopt;
  int64_t value = 0;
  for (; i < text.size(); ++i) value = value * 10 + (text[i] - '0');
  return negative ? -value : value;
}

Decimal normalised(bool negative, std::string digits, int64_t exponent) {
  const size_t first = digits.find_first_not_of('0');
  if (first == std::string::npos) return {};
  digits.erase(digits.find_last_not_of('0') + 1);
  digits.erase(0, first);
  return {negative, std::move(digits), exponent - static_cast<int64_t>(first)};
}

// The value of an unsigned decimal in the grammar of skip_decimal.
std::optional<Decimal> parse_decimal(std::string_view text) {
  const size_t e = text.find_first_of("eE");
  const std::string_view mantissa = text.substr(0, e);
  const auto exponent =
      e == std::string_view::npos ? std::optional<int64_t>(0) : parse_exponent(text.substr(e + 1));
  std::string digits;
  digits.reserve(mantissa.size());
  std::optional<size_t> point;
  for (const char c : mantissa) {
    if (is_digit(c)) digits += c;
    else if (c == '.') point = digits.size();
  }
  const auto before_point = static_cast<int64_t>(point.value_or(digits.size()));
  Decimal value = normalised(false, std::move(digits), before_point);
  if (value.digits.empty()) return value;  // zero, whatever its exponent
  if (!exponent) return std::nullopt;
  value.exponent += *exponent;
  return value;
}

}  // namespace

Decimal multiply(const Decimal& a, const Decimal& b) {
  if (a.digits.empty() || b.digits.empty()) return {};
  std::vector<uint32_t> columns(a.digits.size() + b.digits.size());  // most significant first
  for (size_t i = a.digits.size(); i-- > 0;) {
    uint32_t carry = 0;
    for (size_t j = b.digits.size(); j-- > 0;) {
      const uint32_t value =
          columns[i + j + 1] + static_cast<uint32_t>(a.digits[i] - '0') * (b.digits[j] - '0') + carry;
      columns[i + j + 1] = value % 10;
      carry = value / 10;
    }
    columns[i] += carry;
  }
  std::string digits;
  digits.reserve(columns.size());
  for (const uint32_t column : columns) digits += static_cast<char>('0' + column);
  return normalised(a.negative != b.negative, std::move(digits), a.exponent + b.exponent);
}

bool operator==(const ExactNumber& a, const ExactNumber& b) {
  if (a.denominator == b.denominator) return a.numerator == b.numerator;
  // If only one number is a quotient n / d, let m be the other. n and d have at most kMaxQuotientDigits
  // digits, but m may have millions. If m = n / d, m has fewer digits than n has, plus 2.4 times as many as d
  // has. (The worst d are powers of two.) A longer m is therefore not equal.
  const auto too_long = [](const Decimal& d) { return d.digits.size() > 4 * kMaxQuotientDigits; };
  if (too_long(a.numerator) || too_long(b.numerator)) return false;
  return multiply(a.numerator, b.denominator) == multiply(b.numerator, a.denominator);
}

NumberSpan find_number(std::string_view text, size_t from, bool quotients) {
  size_t i = from;
  while (i < text.size() && !is_digit(text[i])) ++i;
  if (i >= text.size()) return {text.size(), 0};
  const bool point = i > from && text[i - 1] == '.' && !(i > 1 && is_digit(text[i - 2]));
  size_t begin = point ? i - 1 : i;
  size_t end = skip_decimal(text, begin);
  // Moves `begin` back to include "-$", "$-", "-" or "$", but never before `from`, which may be the end of
  // the previous number.
  const auto take = [&](size_t length) {
    if (begin >= from + length) begin -= length;
  };
  const auto ends_with = [&](auto length_at) {
    for (const size_t length : {1, 2, 3})
      if (begin >= from + length && length_at(text, begin - length) == length) return length;
    return size_t{0};
  };
  const auto take_sign = [&] {
    const size_t length = ends_with(sign_length);
    if (length == 0 || operand_before(text, begin - length)) return false;
    take(length);
    return true;
  };
  const bool had_sign = take_sign();
  if (const size_t length = ends_with(currency_length)) {
    take(length);
    if (!had_sign) take_sign();
  }
  if (quotients && end + 1 < text.size() && text[end] == '/' &&
      (digit_at(text, end + 1) || text[end + 1] == '.')) {
    const size_t denominator_end = skip_decimal(text, end + 1);
    if (denominator_end > end + 1) end = denominator_end;
  }
  return {begin, end - begin};
}

std::optional<ExactNumber> parse_number(std::string_view span) {
  bool negative = false;
  size_t i = 0;
  while (i < span.size() && !is_digit(span[i]) && span[i] != '.') {
    if (const size_t sign = sign_length(span, i)) {
      negative = span[i] != '+';
      i += sign;
    } else {
      i += std::max<size_t>(1, currency_length(span, i));
    }
  }
  span.remove_prefix(i);
  if (span.empty()) return std::nullopt;
  const size_t slash = span.find('/');
  const auto numerator = parse_decimal(span.substr(0, slash));
  if (!numerator) return std::nullopt;
  ExactNumber number{*numerator};
  if (!number.numerator.digits.empty()) number.numerator.negative = negative;
  if (slash == std::string_view::npos) return number;
  const auto denominator = parse_decimal(span.substr(slash + 1));
  if (!denominator || denominator->digits.empty()) return std::nullopt;
  if (std::max(numerator->digits.size(), denominator->digits.size()) > kMaxQuotientDigits)
    return std::nullopt;
  number.denominator = *denominator;
  return number;
}

}  // namespace bough
