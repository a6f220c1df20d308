// The part of Jinja that chat templates in ChatML are written in, as transformers runs them (trim_blocks and
// lstrip_blocks on).
//
// Statements: if/elif/else, for over a list, set (a name or a namespace's attribute), generation.
// Expressions: literals, names, attributes, subscripts, slices of lists, or/and/not, comparisons, in, is, + -
// ~ * // %, inline if, filters length/trim/first/last, string methods
// strip/lstrip/rstrip/split/startswith/endswith, functions namespace and raise_exception. A construct outside
// of this grammar is a UserError when parsing; an unknown filter, test, method or function only when it is
// executed (templates have branches for tools).
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"

namespace bough::jinja {

// Values are JSON; an undefined one is Json(value_t::discarded).
struct Expression {
  enum class Kind {
    kLiteral,    // value
    kName,       // name
    kAttribute,  // operands[0].name
    kSubscript,  // operands[0][operands[1]]
    kSlice,      // operands[0][operands[1]:operands[2]:operands[3]], undefined where left out
    kCall,       // operands[0](operands[1...], keywords)
    kFilter,     // operands[0] | name
    kTest,       // operands[0] is name
    kList,       // [operands...]
    kUnary,      // name is "not" or "-"
    kBinary,     // name is the operator
    kInlineIf,   // operands[1] if operands[0] else operands[2]
  };
  Kind kind;
  std::string name;
  Json value;
  std::vector<Expression> operands;
  std::vector<std::string> keywords;  // of a call: names of its last operands
};

struct Statement {
  enum class Kind {
    kText,    // text
    kOutput,  // expressions[0]
    kIf,      // body while expressions[0], else otherwise
    kFor,     // for text in expressions[0]: body
    kSet,     // target expressions[0] (name or attribute) = expressions[1]
    kBlock,   // body
  };
  Kind kind;
  std::string text;
  std::vector<Expression> expressions;
  std::vector<Statement> body, otherwise;
};

// `name` is what error messages call the template.
std::vector<Statement> parse(std::string_view source, const std::string& name);

// Runs the program. UserError: the template raised an exception, or reached something not supported.
std::string render(const std::vector<Statement>& program, const Json& variables, const std::string& name);

}  // namespace bough::jinja
