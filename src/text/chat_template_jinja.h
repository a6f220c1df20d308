// Jinja as chat templates use it and transformers runs it: trim_blocks, lstrip_blocks, loopcontrols, the
// `generation` tag, no changes of lists and dicts (jinja2's ImmutableSandboxedEnvironment), and `tojson`,
// `raise_exception` and `strftime_now` of transformers.
//
// parse() reads the whole language but for imports, inheritance, `autoescape`, `trans` and calls with * or
// **; what it does not know is a UserError that names it and its line. An unknown filter, test, method or
// function is one only when it is reached, as are errors that Python would raise.
//
// Templates come from strangers: nesting, steps and the size of texts are bounded far beyond what a
// conversation needs.
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
    kSlice,      // operands[0][operands[1]:operands[2]:operands[3]], None where left out
    kCall,       // operands[0](operands[1...]); the last ones are called names[...]
    kFilter,     // operands[0] | name(operands[1...]); likewise. Without operands[0] in a filter block
    kTest,       // operands[0] is name(operands[1...]); likewise
    kList,       // [operands...]
    kTuple,      // (operands...)
    kDict,       // {operands[0]: operands[1], ...}
    kUnary,      // name is "not", "-" or "+"
    kBinary,     // name is the operator
    kCompare,    // operands[0] names[0] operands[1] names[1] ...
    kInlineIf,   // operands[1] if operands[0] else operands[2], which may be missing
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
    kText,    // text
    kOutput,  // expressions[0]
    kIf,      // the first of bodies whose expression is true, else otherwise
    kFor,     // for expressions[0] in expressions[1] if expressions[2] (may be missing): bodies[0], otherwise
    kSet,     // expressions[0] = expressions[1]
    kSetBlock,     // expressions[0] = bodies[0], through the filters of expressions[1] (may be missing)
    kMacro,        // macro text(names...): bodies[0]; expressions are the defaults of the last names
    kCall,         // as kMacro, of the caller; the call is the last of expressions
    kFilterBlock,  // bodies[0] through the filters of expressions[0]
    kWith,         // bodies[0] with pairs of targets and values in expressions
    kScope,        // bodies[0]
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
  bool recursive = false;                                               // of kFor
  bool uses_caller = false, uses_varargs = false, uses_kwargs = false;  // of kMacro and kCall
};

// `name` is what error messages call the template. UserError: "<name>:<line>: chat template: ...".
Block parse(std::string_view source, const std::string& name);

// Runs the program with the variables of a dict. `now` is what strftime_now shows, in local time. UserError:
// the template raised an exception, or reached something not supported.
std::string render(const Block& program, const Value& variables, const std::string& name, std::time_t now);

}  // namespace bough::jinja
