// Untrusted text inside HTML. Everything that did not come from this program's source goes through here.
#pragma once

#include <string>
#include <string_view>

namespace bough {

// Safe as element content and inside quoted attributes: & < > " ' escaped, bytes that are not UTF-8 replaced
// by U+FFFD, control characters but line break and tab shown as their picture (U+2400 ff.).
std::string html_escape(std::string_view text);

// The beginning of `text`, at most `max_bytes` long and never cut inside a character, with "…" where it was
// cut.
std::string cut_text(std::string_view text, size_t max_bytes);

}  // namespace bough
