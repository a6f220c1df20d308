// Splits a template's source into tokens as jinja2's lexer does, white space control included.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace bough::jinja {

struct Token {
  enum class Kind {
    kText,
    kOutputBegin,
    kBlockBegin,
    kTagEnd,
    kName,
    kString,
    kInteger,
    kFloat,
    kOperator,
    kEnd
  };
  Kind kind;
  std::string text;
  int line;
};

// Error messages call the template `name`.
std::vector<Token> tokens_of(std::string_view source, const std::string& name);

// Throws UserError: "<name>:<line>: chat template: <what>".
[[noreturn]] void refuse(const std::string& name, int line, const std::string& what);

}  // namespace bough::jinja
