#include "base/error.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace bough {

namespace {
// Length of the valid UTF-8 character at text[i], or 0.
size_t utf8_length(std::string_view text, size_t i) {
  const auto byte = [&](size_t j) { return static_cast<unsigned char>(text[j]); };
  const unsigned char lead = byte(i);
  const size_t length = lead < 0x80                   ? 1
                        : lead >= 0xC2 && lead < 0xE0 ? 2
                        : lead >= 0xE0 && lead < 0xF0 ? 3
                        : lead >= 0xF0 && lead < 0xF5 ? 4
                                                      : 0;
  if (length == 0 || i + length > text.size()) return 0;
  for (size_t j = 1; j < length; ++j)
    if ((byte(i + j) & 0xC0) != 0x80) return 0;
  return length;
}
}  // namespace

std::string quoted(std::string_view text, size_t max_length) {
  static const char* hex = "0123456789abcdef";
  std::string out = "'";
  size_t i = 0;
  size_t shown = 0;
  while (i < text.size() && shown < max_length) {
    const size_t length = utf8_length(text, i);
    const unsigned char byte = static_cast<unsigned char>(text[i]);
    if (length == 0 || byte < 0x20 || byte == 0x7F) {
      if (byte == '\n') out += "\\n";
      else if (byte == '\t') out += "\\t";
      else (out += "\\x") += {hex[byte >> 4], hex[byte & 15]};
      ++i;
    } else {
      out += text.substr(i, length);
      i += length;
    }
    ++shown;
  }
  out += i < text.size() ? "…'" : "'";
  return out;
}

std::string nearest(std::string_view name, const char* const* begin, const char* const* end) {
  std::string best;
  size_t best_distance = std::max<size_t>(2, name.size() / 3) + 1;
  for (auto it = begin; it != end; ++it) {
    const std::string_view candidate = *it;
    std::vector<size_t> row(candidate.size() + 1);
    for (size_t j = 0; j < row.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= name.size(); ++i) {
      size_t diagonal = row[0];
      row[0] = i;
      for (size_t j = 1; j <= candidate.size(); ++j) {
        const size_t substitute = diagonal + (name[i - 1] != candidate[j - 1]);
        diagonal = row[j];
        row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitute});
      }
    }
    if (row.back() < best_distance) best_distance = row.back(), best = candidate;
  }
  return best;
}

namespace internal {
void check_failed(const char* condition, const char* file, int line, const std::string& message) {
  throw InternalError(
      str("internal error: ", condition, " does not hold (", message, ") at ", file, ":", line));
}
}  // namespace internal
}  // namespace bough
