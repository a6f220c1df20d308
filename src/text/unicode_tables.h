// Differences between the Unicode data of Hugging Face's `tokenizers` and of the libraries that Bough uses.
// Tables are sorted by code point and do not overlap. unicode_tables.py generates unicode_tables.cpp.
//   `tokenizers` 0.23: Unicode 16 in regular expressions, Unicode 9 in NFC
//   Bough:             Unicode 14 in PCRE2 10.42,         Unicode 15 in utf8proc 2.8
#pragma once

#include <span>

namespace bough::unicode {

struct Range {
  char32_t first, last;
};

// The code points first..last have another general category in `tokenizers` than in PCRE2. The stand-in
// `code_point` has, in both, the category that `tokenizers` gives them, and as many bytes in UTF-8.
struct StandIn {
  char32_t first, last, code_point;
};

extern const std::span<const StandIn> kStandIns;

// Code points that the NFC of `tokenizers` (Unicode 9) leaves alone, but that utf8proc reorders or composes.
extern const std::span<const Range> kInertInNfc;

}  // namespace bough::unicode
