// A Jinja interpreter for chat templates, with the settings of transformers:
//   - trim_blocks, lstrip_blocks, loopcontrols, and the `generation` tag
//   - immutable lists and dicts (jinja2's ImmutableSandboxedEnvironment)
//   - the functions `tojson`, `raise_exception` and `strftime_now`
//
// Not supported: imports, inheritance, `autoescape`, `trans`, and calls with * or **. For these, parse()
// throws a UserError that names the construct and its line. An unknown filter, test, method or function
// throws only when the template executes it, as do errors that Python would raise.
//
// Templates are untrusted. Nesting, steps and text sizes have limits far above the needs of a conversation.
#pragma once

#include <ctime>
#include <string>
#include <string_view>
#include <vector>

#include "text/chat_template_value.h"

namespace bough::jinja {

struct Expression {
  enum class Kind {
    kLiteral,    // value
    kName,       // name
    kAttribute,  // operands[0].name
    kSubscript,  // operands[0][operands[1]]
    kSlice,      // operands[0][operands[1]:operands[2]:operands[3]]; omitted operands are None
    kCall,       // operands[0](operands[1...]); the last operands are the keyword arguments names[...]
    kFilter,     // operands[0] | name(operands[1...]); keywords as in kCall; filter block: no operands[0]
    kTest,       // operands[0] is name(operands[1...]), keywords as in kCall
    kList,       // [operands...]
    kTuple,      // (operands...)
    kDict,       // {operands[0]: operands[1], ...}
    kUnary,      // name is "not", "-" or "+"
    kBinary,     // name is the operator
    kCompare,    // operands[0] names[0] operands[1] names[1] ...
    kInlineIf,   // operands[1] if operands[0] else operands[2]; operands[2] may be missing
  };
  Kind kind;
  int line;
  std::string name;
  std::vector<Expression> operands;
  std::vector<std::string> names;
  Value value;
  int depth = 1;
};

struct Statement;
using Block = std::vector<Statement>;

struct Statement {
  enum class Kind {
    kText,      // text
    kOutput,    // expressions[0]
    kIf,        // the first of `bodies` whose expression is true, else `otherwise`
    kFor,       // for expressions[0] in expressions[1] if expressions[2] (optional): bodies[0], `otherwise`
    kSet,       // expressions[0] = expressions[1]
    kSetBlock,  // expressions[0] = bodies[0], through the filters of expressions[1] (optional)
    kMacro,     // macro text(names...): bodies[0]; `expressions`: defaults of the last names
    kCall,      // call block: as kMacro for `caller`; the last of `expressions` is the call
    kFilterBlock,  // bodies[0] through the filters of expressions[0]
    kWith,         // bodies[0]; `expressions`: pairs of target and value
    kScope,        // bodies[0] in a scope of its own: the tag `generation`
    kBreak,
    kContinue,
  };
  Kind kind;
  int line;
  std::string text;
  std::vector<Expression> expressions;
  std::vector<std::string> names;
  std::vector<Block> bodies;
  Block otherwise;
  bool recursive = false;                                               // kFor
  bool uses_caller = false, uses_varargs = false, uses_kwargs = false;  // kMacro and kCall
};

// Error messages call the template `name`. Throws UserError "<name>:<line>: chat template: ..." if the
// template is invalid or has an unsupported construct.
Block parse(std::string_view source, const std::string& name);

// Runs the program and returns its output. `variables`: a dict. `now`: the time that strftime_now formats, as
// local time. Throws UserError if the template raises an exception or executes something unsupported.
std::string render(const Block& program, const Value& variables, const std::string& name, std::time_t now);

}  // namespace bough::jinja
