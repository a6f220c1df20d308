// The types that the tools' JSON schemas allow an argument of a call. Formats that write arguments as plain
// text need them.
#pragma once

#include <string>

#include "base/json.h"

namespace bough {

struct AllowedTypes {
  bool any = true;  // the schemas do not say
  bool string = true, null = true;
};

// `tools`: null, or an array in OpenAI's format. Types behind $ref (local to a schema), allOf, anyOf and
// oneOf are found.
AllowedTypes argument_types(const OrderedJson& tools, const std::string& name, const std::string& key);

}  // namespace bough
