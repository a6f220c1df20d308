#include "text/unicode_text.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "base/error.h"
#include "text/unicode_tables.h"

namespace bough::unicode {
namespace {

// Returns the entry of a sorted table whose range contains `code_point`; nullptr if there is none.
template <class Entry>
const Entry* find(std::span<const Entry> table, char32_t code_point) {
  const auto after = std::upper_bound(table.begin(), table.end(), code_point,
                                      [](char32_t c, const Entry& entry) { return c < entry.first; });
  if (after == table.begin()) return nullptr;
  const Entry& entry = *(after - 1);
  return code_point <= entry.last ? &entry : nullptr;
}

// Returns whether `second` may follow the first byte `lead` of a character. The range is narrower than 80..BF
// if otherwise the character could be overlong, a surrogate or beyond U+10FFFF.
bool valid_second(unsigned char lead, unsigned char second) {
  switch (lead) {
    case 0xE0: return second >= 0xA0 && second <= 0xBF;
    case 0xED: return second >= 0x80 && second <= 0x9F;
    case 0xF0: return second >= 0x90 && second <= 0xBF;
    case 0xF4: return second >= 0x80 && second <= 0x8F;
    default: return (second & 0xC0) == 0x80;
  }
}

void append_nfc(std::string& out, std::string_view text) {
  if (text.empty()) return;
  utf8proc_uint8_t* result = nullptr;
  const utf8proc_ssize_t length = utf8proc_map(
      reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
      &result, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(result, &std::free);
  if (length == UTF8PROC_ERROR_NOMEM) throw std::bad_alloc();
  BOUGH_CHECK(length >= 0, "NFC of a text of ", text.size(), " bytes: ", utf8proc_errmsg(length));
  out.append(reinterpret_cast<const char*>(result), static_cast<size_t>(length));
}

}  // namespace

Decoded decode(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {lead, 1, true, false};
  if (lead < 0xC2 || lead > 0xF4) return {0xFFFD, 1, false, false};
  const size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  char32_t code_point = lead & (0x7F >> length);
  for (size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {0xFFFD, i, false, true};
    const bool good = i == 1 ? valid_second(lead, byte(1)) : (byte(i) & 0xC0) == 0x80;
    if (!good) return {0xFFFD, i, false, false};
    code_point = code_point << 6 | (byte(i) & 0x3F);
  }
  return {code_point, length, true, false};
}

std::optional<size_t> find_invalid(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const Decoded next = decode(text.substr(i));
    if (!next.valid) return i;
    i += next.length;
  }
  return std::nullopt;
}

std::string replace_invalid(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const Decoded next = decode(text.substr(i));
    if (next.valid) out += text.substr(i, next.length);
    else append(out, next.code_point);
    i += next.length;
  }
  return out;
}

void append(std::string& out, char32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c);
    return;
  }
  const int continuation_bytes = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
  const int lead = continuation_bytes == 1 ? 0xC0 : continuation_bytes == 2 ? 0xE0 : 0xF0;
  out += static_cast<char>(lead | static_cast<int>(c >> (6 * continuation_bytes)));
  for (int i = continuation_bytes - 1; i >= 0; --i) out += static_cast<char>(0x80 | (c >> (6 * i) & 0x3F));
}

bool is_white_space(char32_t c) {
  return (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

size_t character_before(std::string_view text, size_t end) {
  do --end;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80);
  return end;
}

size_t skip_white_space(std::string_view text, size_t position) {
  while (position < text.size()) {
    const Decoded next = decode(text.substr(position));
    if (!is_white_space(next.code_point)) break;
    position += next.length;
  }
  return position;
}

size_t skip_white_space_back(std::string_view text, size_t position) {
  while (position > 0) {
    const size_t before = character_before(text, position);
    if (!is_white_space(decode(text.substr(before)).code_point)) break;
    position = before;
  }
  return position;
}

std::string nfc(std::string_view text) {
  // Below U+0300 nothing composes, reorders or decomposes; in UTF-8 that is every byte below 0xCC.
  const bool plain =
      std::none_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) >= 0xCC; });
  if (plain) return std::string(text);
  std::string out;
  out.reserve(text.size());
  size_t begin = 0;  // start of the text that has not been normalized yet
  for (size_t i = 0; i < text.size();) {
    const Decoded next = decode(text.substr(i));
    if (next.length > 1 && find(kInertInNfc, next.code_point)) {
      append_nfc(out, text.substr(begin, i - begin));
      out += text.substr(i, next.length);
      begin = i + next.length;
    }
    i += next.length;
  }
  append_nfc(out, text.substr(begin));
  return out;
}

std::string with_stand_ins(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    if (static_cast<unsigned char>(text[i]) < 0x80) {
      ++i;
      continue;
    }
    const Decoded next = decode(text.substr(i));
    if (const StandIn* entry = find(kStandIns, next.code_point)) {
      if (out.empty()) out = text;
      std::string replacement;
      append(replacement, entry->code_point);
      out.replace(i, next.length, replacement);
    }
    i += next.length;
  }
  return out;
}

}  // namespace bough::unicode
