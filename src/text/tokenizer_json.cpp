#include "text/tokenizer_json.h"

#include <array>

#include "base/error.h"
#include "text/unicode_text.h"

namespace bough::tokenizer_json {

std::string shown(const Json& value) {
  return bough::quoted(dump_line(value));
}

std::string type_of(const Json& part, const std::string& where) {
  if (!part.is_object() || !part.contains("type") || !part["type"].is_string())
    throw UserError(str(where, ": expected an object with a type, got ", shown(part)));
  return part["type"];
}

bool flag(const Json& part, const char* key, bool otherwise, const std::string& where) {
  const Json value = part.value(key, Json());
  if (value.is_null()) return otherwise;
  if (!value.is_boolean())
    throw UserError(str(where, ": ", key, " must be true or false, got ", shown(value)));
  return value;
}

std::string text_of(const Json& part, const char* key, const std::string& where) {
  const Json value = part.value(key, Json());
  if (!value.is_string()) throw UserError(str(where, ": expected a text `", key, "`, got ", shown(value)));
  return value;
}

const Json& list_of(const Json& part, const char* key, const std::string& where) {
  if (!part.contains(key) || !part[key].is_array())
    throw UserError(str(where, ": a Sequence needs a list `", key, "`"));
  return part[key];
}

unicode::Regex pattern_of(const Json& part, const std::string& where) {
  const Json pattern = part.value("pattern", Json());
  const auto given = [&](const char* kind) -> std::string {
    if (!pattern.is_object() || !pattern.contains(kind) || !pattern[kind].is_string()) return "";
    return pattern[kind];
  };
  const std::string regex = given("Regex");
  const std::string literal = given("String");
  if (regex.empty() == literal.empty())
    throw UserError(str(where, ": the pattern must be one Regex or one String, and not empty"));
  return regex.empty() ? unicode::Regex::literal(literal) : unicode::Regex::compile(regex, where);
}

Metaspace metaspace_of(const Json& part, const std::string& where) {
  constexpr std::array kSchemes = {"always", "first", "never"};
  Metaspace result;
  result.replacement = text_of(part, "replacement", where);
  if (result.replacement.empty() || unicode::decode(result.replacement).length != result.replacement.size())
    throw UserError(
        str(where, ": replacement must be one character, got ", bough::quoted(result.replacement)));
  const Json scheme = part.value("prepend_scheme", Json("always"));
  size_t index = 0;
  while (index < kSchemes.size() && scheme != kSchemes[index]) ++index;
  if (index == kSchemes.size())
    throw UserError(str(where, ": prepend_scheme must be always, first or never, got ", shown(scheme)));
  result.prepend = static_cast<Metaspace::Prepend>(index);
  if (!flag(part, "add_prefix_space", true, where) && result.prepend != Metaspace::Prepend::kNever)
    throw UserError(str(where, ": add_prefix_space is false, but prepend_scheme is ", shown(scheme),
                        ": write \"prepend_scheme\": \"never\""));
  result.split = flag(part, "split", true, where);
  return result;
}

}  // namespace bough::tokenizer_json
