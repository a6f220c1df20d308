// UTF-8 and the few Unicode operations that the tokenizer needs. All texts are UTF-8.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace bough::unicode {

struct Decoded {
  char32_t code_point;  // U+FFFD where the bytes are not UTF-8
  size_t length;        // bytes read; for invalid bytes the longest part that could have begun a character
  bool valid;
  bool truncated;  // invalid only because the text ends: more bytes could complete it
};

// Decodes the character at text[0]; `text` must not be empty.
Decoded decode(std::string_view text);

// Returns the position of the first byte that is not UTF-8, if there is one.
std::optional<size_t> find_invalid(std::string_view text);

// `text` with U+FFFD for every maximal part that is not UTF-8 (the Unicode standard's recommended practice,
// and Rust's from_utf8_lossy).
std::string replace_invalid(std::string_view text);

void append(std::string& out, char32_t code_point);

// Whether the code point has Unicode's property White_Space.
bool is_white_space(char32_t code_point);

// Returns the begin of the character that ends at `end` > 0.
size_t character_before(std::string_view text, size_t end);

// The end of the white space that begins at `position`, and the begin of the white space that ends there.
size_t skip_white_space(std::string_view text, size_t position);
size_t skip_white_space_back(std::string_view text, size_t position);

// NFC as `tokenizers` computes it. `text` must be valid.
std::string nfc(std::string_view text);

// `text`, same length, with every code point whose general category PCRE2 does not know, or knows otherwise
// than `tokenizers`, replaced by one of the right category. Regular expressions that name no such code point
// match alike on both. Empty if nothing had to be replaced. `text` must be valid.
std::string with_stand_ins(std::string_view text);

}  // namespace bough::unicode
