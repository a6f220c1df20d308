// Classes of ASCII characters, whatever the locale is, and the trimming of text.
#pragma once

#include <string_view>

namespace bough {

inline bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

inline bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

inline constexpr std::string_view kSpaces = " \t\n\v\f\r";

inline bool is_space(char c) {
  return kSpaces.find(c) != kSpaces.npos;
}

// Returns text without the characters of `blanks` at its two ends.
inline std::string_view trimmed(std::string_view text, std::string_view blanks = " \t\r\n") {
  const size_t begin = text.find_first_not_of(blanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(blanks) - begin + 1);
}

}  // namespace bough
