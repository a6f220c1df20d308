// Differences between the Unicode data of Hugging Face's `tokenizers` and of the libraries used here. Sorted
// by code point, without overlaps. unicode_tables.py generates unicode_tables.cpp.
//   `tokenizers` 0.23: Unicode 16 in regular expressions, Unicode 9 in NFC
//   here:              Unicode 14 in PCRE2 10.42,         Unicode 15 in utf8proc 2.8
#pragma once

#include <span>

namespace bough::unicode {

struct Range {
  char32_t first, last;
};

// Code points first..last have another general category in `tokenizers` than in PCRE2. `code_point` has the
// category of `tokenizers` in both libraries, and as many bytes in UTF-8.
struct StandIn {
  char32_t first, last, code_point;
};

extern const std::span<const StandIn> kStandIns;

// Code points that the older NFC of `tokenizers` does not reorder or compose, but utf8proc does.
extern const std::span<const Range> kInertInNfc;

}  // namespace bough::unicode
