// Readers of keys that occur in several parts of a tokenizer.json: type, flags, patterns and Metaspace.
// `where` names the file and the part in error messages. Every reader throws UserError if a required key is
// missing or has the wrong type.
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"
#include "text/unicode_regex.h"

namespace bough::tokenizer_json {

// Returns `value` as JSON on one line, shortened and in quotes, for error messages.
std::string shown(const Json& value);

// Reads the `type` of a part such as {"type": "ByteLevel", ...}.
std::string type_of(const Json& part, const std::string& where);

// Reads the boolean `key`. Returns `otherwise` if it is absent or null.
bool flag(const Json& part, const char* key, bool otherwise, const std::string& where);

// Reads the text `key`, which is required.
std::string text_of(const Json& part, const char* key, const std::string& where);

// Reads the list `key` of a Sequence.
const Json& list_of(const Json& part, const char* key, const std::string& where);

// Reads the `pattern` of a Split or Replace: {"Regex": "..."} or {"String": "..."}, not empty.
unicode::Regex pattern_of(const Json& part, const std::string& where);

// Metaspace: a visible character replaces spaces. The character may also be put in front of the text.
struct Metaspace {
  enum class Prepend { kAlways, kFirst, kNever };  // kFirst: only at the true beginning of the text

  std::string replacement;  // one character in UTF-8, mostly ▁ (U+2581)
  Prepend prepend = Prepend::kAlways;
  bool split = true;  // a new word begins at every replacement
};
Metaspace metaspace_of(const Json& part, const std::string& where);

}  // namespace bough::tokenizer_json
