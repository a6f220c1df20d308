// Untrusted text inside HTML or on a terminal. All text in HTML that is not a constant of Bough's source code
// must be escaped here.
#pragma once

#include <string>
#include <string_view>

namespace bough {

// Makes text safe as element content and inside quoted attributes. Escapes & < > " '. Replaces bytes that are
// not UTF-8 by U+FFFD. Replaces control characters, except line break and tab, by their visible symbols (from
// U+2400 on).
std::string html_escape(std::string_view text);

// Replaces control characters by spaces, except those in `kept`: text of data must not reach a terminal as
// commands to it.
std::string without_controls(std::string text, std::string_view kept);

// Returns the first `max_bytes` bytes of `text`, or fewer so that no UTF-8 character is cut. Appends "…" if
// the text was cut.
std::string cut_text(std::string_view text, size_t max_bytes);

}  // namespace bough
