// Python literals and calls, as models write them in tool calls. All functions throw jinja::Error.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace bough {

// Reads a text, number, True, False, None, list, tuple or dict with texts as keys. JSON's words are accepted,
// too.
OrderedJson read_python_literal(std::string_view text);

struct PythonCall {
  std::string name;
  OrderedJson arguments;  // an object
};

// Reads name(key=literal, ...), one call, several, or a list of them. There is at least one.
std::vector<PythonCall> read_python_calls(std::string_view text);

}  // namespace bough
