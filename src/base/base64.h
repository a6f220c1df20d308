// Base64 text (RFC 4648, section 4) to bytes.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace bough {

// nullopt if the text is not base64: another character, a length that is no multiple of 4, padding elsewhere
// than at the end.
std::optional<std::string> base64_decode(std::string_view text);

}  // namespace bough
