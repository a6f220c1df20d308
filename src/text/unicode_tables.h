// Where the Unicode data of Hugging Face's `tokenizers` (0.23: Unicode 16 in regular expressions, Unicode 9
// in NFC) differs from the libraries used here (PCRE2 10.42: Unicode 14, utf8proc 2.8: Unicode 15). Generated
// by unicode_tables.py. Sorted by code point, without overlaps.
#pragma once

#include <span>

namespace bough::unicode {

struct Range {
  char32_t first, last;
};

// Code points first..last have, for `tokenizers`, another general category than for PCRE2; `code_point` has
// that category for both, and as many bytes in UTF-8.
struct StandIn {
  char32_t first, last, code_point;
};

extern const std::span<const StandIn> kStandIns;

// Code points that `tokenizers` does not reorder or compose: its NFC is older than they are, or than what is
// now known about them.
extern const std::span<const Range> kInertInNfc;

}  // namespace bough::unicode
