// UTF-8 and the few Unicode operations that the tokenizer needs. All texts are UTF-8.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace bough::unicode {

struct Decoded {
  char32_t code_point;  // U+FFFD if the bytes are not UTF-8
  size_t length;        // bytes read; if not UTF-8, the longest prefix that could begin a character
  bool valid;
  bool truncated;  // not UTF-8 only because the text ends: more bytes could complete it
};

// Decodes the character at text[0]; `text` must not be empty.
Decoded decode(std::string_view text);

// Returns the position of the first byte that is not UTF-8, or nullopt.
std::optional<size_t> find_invalid(std::string_view text);

// Replaces every maximal part that is not UTF-8 by one U+FFFD, as the Unicode standard recommends and as
// Rust's from_utf8_lossy does.
std::string replace_invalid(std::string_view text);

void append(std::string& out, char32_t code_point);

// Whether the code point has Unicode's property White_Space.
bool is_white_space(char32_t code_point);

// Returns the byte position at which the character begins that ends at byte `end` > 0.
size_t character_before(std::string_view text, size_t end);

// Return the end of the white space that begins at `position`, or the start of the white space that ends
// there (back).
size_t skip_white_space(std::string_view text, size_t position);
size_t skip_white_space_back(std::string_view text, size_t position);

// NFC as `tokenizers` computes it. `text` must be valid UTF-8.
std::string nfc(std::string_view text);

// Replaces every code point that has another general category in PCRE2 than in `tokenizers` by a stand-in.
// The stand-in has the right category in both, and the same length in bytes. So a regular expression that
// does not name the code point matches as in `tokenizers`. Returns an empty string if nothing is replaced.
// `text` must be valid UTF-8.
std::string with_stand_ins(std::string_view text);

}  // namespace bough::unicode
