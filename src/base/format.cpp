#include "base/format.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdio>

namespace bough {
namespace {

// printf("%.*<conversion>") as a string; `conversion` is f or g.
std::string print_number(double value, int digits, char conversion) {
  std::array<char, 400> buffer;  // 1.8e308 in full has 309 digits before the point
  const char format[] = {'%', '.', '*', conversion, '\0'};
  const int length = std::snprintf(buffer.data(), buffer.size(), format, digits, value);
  return {buffer.data(), static_cast<size_t>(length)};
}

// At most three significant digits, without trailing zeros after the point: 1.50 -> "1.5", 123.4 -> "123".
std::string three_digits(double value) {
  const double size = std::abs(value);
  std::string out = print_number(value, size < 9.995 ? 2 : size < 99.95 ? 1 : 0, 'f');
  if (out.find('.') != std::string::npos) {
    out.erase(out.find_last_not_of('0') + 1);
    if (out.back() == '.') out.pop_back();
  }
  return out;
}

std::string with_unit(double value, double step, std::initializer_list<const char*> units) {
  if (!std::isfinite(value)) return print_number(value, 0, 'f');
  auto unit = units.begin();
  // 999.5 would be rounded to "1000" of the smaller unit.
  while (std::abs(value) >= (step == 1000 ? 999.5 : step) && unit + 1 != units.end()) value /= step, ++unit;
  return three_digits(value) + *unit;
}

std::string two_digits(int64_t value) {
  return (value < 10 ? "0" : "") + std::to_string(value);
}

// Decodes one code point at text[i] and moves i behind it; a byte that is not UTF-8 counts as one character.
char32_t next_code_point(std::string_view text, size_t& i) {
  const unsigned char lead = static_cast<unsigned char>(text[i++]);
  const int following = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : lead >= 0xC0 ? 1 : 0;
  char32_t code = following == 3   ? lead & 0x07
                  : following == 2 ? lead & 0x0F
                  : following == 1 ? lead & 0x1F
                                   : lead;
  for (int k = 0; k < following && i < text.size(); ++k) {
    const unsigned char byte = static_cast<unsigned char>(text[i]);
    if ((byte & 0xC0) != 0x80) break;
    code = code << 6 | (byte & 0x3F);
    ++i;
  }
  return code;
}

struct Interval {
  char32_t first, last;
};
// Coarse ranges of code points: enough to keep a table aligned, not a full East Asian Width table.
constexpr Interval kCombining[] = {{0x300, 0x36F}, {0x200B, 0x200F}, {0x20D0, 0x20FF}, {0xFE00, 0xFE0F}};
constexpr Interval kWide[] = {{0x1100, 0x115F}, {0x2E80, 0xA4CF},   {0xAC00, 0xD7A3},
                              {0xF900, 0xFAFF}, {0xFE30, 0xFE6F},   {0xFF00, 0xFF60},
                              {0xFFE0, 0xFFE6}, {0x1F300, 0x1FAFF}, {0x20000, 0x3FFFD}};

int width_of(char32_t code) {
  const auto inside = [code](const Interval& i) { return code >= i.first && code <= i.last; };
  if (std::any_of(std::begin(kCombining), std::end(kCombining), inside)) return 0;
  return std::any_of(std::begin(kWide), std::end(kWide), inside) ? 2 : 1;
}
}  // namespace

std::string format_bytes(double num_bytes) {
  return with_unit(num_bytes, 1024, {" B", " KiB", " MiB", " GiB", " TiB", " PiB"});
}

std::string format_count(double count) {
  return with_unit(count, 1000, {"", "k", "M", "G", "T"});
}

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds)) return "unknown";
  if (seconds < 0) return "-" + format_duration(-seconds);
  if (seconds < 0.9995e-3) return three_digits(seconds * 1e6) + " µs";
  if (seconds < 0.9995) return three_digits(seconds * 1e3) + " ms";
  if (seconds < 59.95) return three_digits(seconds) + " s";
  if (seconds > 1e15) return "for ever";
  const int64_t total = std::llround(seconds);
  const int64_t days = total / 86400, hours = total / 3600 % 24, minutes = total / 60 % 60;
  if (days > 0) return std::to_string(days) + " d " + two_digits(hours) + ":" + two_digits(minutes);
  if (hours > 0) return std::to_string(hours) + ":" + two_digits(minutes) + ":" + two_digits(total % 60);
  return std::to_string(minutes) + ":" + two_digits(total % 60);
}

std::string format_thousands(int64_t value) {
  std::string digits = std::to_string(value);
  const std::ptrdiff_t first = digits[0] == '-' ? 1 : 0;
  for (std::ptrdiff_t i = static_cast<std::ptrdiff_t>(digits.size()) - 3; i > first; i -= 3)
    digits.insert(static_cast<size_t>(i), 1, ',');
  return digits;
}

std::string format_significant(double value, int digits) {
  return print_number(value, digits, 'g');
}

std::string file_name_part(std::string_view text) {
  std::string name;
  for (const char c : text)
    if (std::isalnum(static_cast<unsigned char>(c)))
      name += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    else if (!name.empty() && name.back() != '-') name += '-';
  while (name.ends_with('-')) name.pop_back();
  return name.substr(0, 120);
}

std::string format_shortest(double value) {
  std::array<char, 32> buffer;  // the longest is "-1.2345678901234567e-308", 24 characters
  const auto [end, code] = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  return {buffer.data(), end};
}

std::string format_choices(std::span<const std::string_view> names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " or " : ", ";
    text += names[i];
  }
  return text;
}

int display_width(std::string_view text) {
  int width = 0;
  for (size_t i = 0; i < text.size();) width += width_of(next_code_point(text, i));
  return width;
}

std::string fit(std::string_view text, int columns) {
  if (columns <= 0) return "";
  int width = 0;
  size_t keep = 0;  // bytes of text that leave one column for the ellipsis
  for (size_t i = 0; i < text.size();) {
    width += width_of(next_code_point(text, i));
    if (width <= columns - 1) keep = i;
    if (width > columns) return std::string(text.substr(0, keep)) + "…";
  }
  return std::string(text);
}

}  // namespace bough
