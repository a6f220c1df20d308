#include "text/chat_template_jinja.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "text/chat_template_machine.h"
#include "text/unicode_text.h"

namespace bough::jinja {
namespace {

constexpr int64_t kMostSteps = 10'000'000;
constexpr size_t kBytesOfAStep = 32;              // output text of this many bytes counts as one step
constexpr size_t kLongestText = size_t{1} << 26;  // bytes
constexpr int kDeepestRecursion = 1500;           // limit on recursion; a level needs less than 1 kB of stack

}  // namespace

Value* Frame::find(std::string_view name) {
  for (Frame* frame = this; frame; frame = frame->parent)
    for (auto& [key, value] : frame->variables)
      if (key == name) return &value;
  return nullptr;
}

void Frame::set(const std::string& name, Value value) {
  for (auto& [key, old] : variables) {
    if (key == name) {
      old = std::move(value);
      return;
    }
  }
  variables.emplace_back(name, std::move(value));
}

// Opens a frame, and closes it when destroyed. Frames close in the reverse order of opening. The machine
// keeps captured frames.
class Machine::Scope {
 public:
  Scope(Machine& machine, Frame* parent) : machine_(machine), frame_(machine.new_frame(parent)) {}
  ~Scope() {
    if (!frame_.captured && machine_.frames_.back().get() == &frame_) machine_.frames_.pop_back();
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  Frame& frame() { return frame_; }

 private:
  Machine& machine_;
  Frame& frame_;
};

class Machine::Level {
 public:
  explicit Level(Machine& machine) : machine_(machine) {
    if (++machine.depth_ > kDeepestRecursion) {
      --machine.depth_;
      fail("it recurses too deeply");
    }
  }
  ~Level() { --machine_.depth_; }
  Level(const Level&) = delete;
  Level& operator=(const Level&) = delete;

 private:
  Machine& machine_;
};

Machine::Machine(const Value& variables, std::time_t now) : now_(now) {
  for (const auto& [name, value] : variables.as_dict().items)
    if (name.is_text()) globals_.set(name.as_text(), value);
}

Frame& Machine::new_frame(Frame* parent) {
  step();
  frames_.push_back(std::make_unique<Frame>(Frame{parent, {}, false}));
  return *frames_.back();
}

void Machine::step(int64_t count) {
  num_steps_ += count;
  if (num_steps_ > kMostSteps) fail("it runs too long");
}

Value Machine::text(std::string text, bool markup) {
  if (text.size() > kLongestText) fail("it makes a text that is too long");
  step(1 + static_cast<int64_t>(text.size() / kBytesOfAStep));
  return Value::text(std::move(text), markup);
}

std::string Machine::run(const Block& program) {
  Scope scope(*this, &globals_);
  execute(program, scope.frame());
  return std::move(out_);
}

Machine::Flow Machine::execute(const Block& block, Frame& frame) {
  const Level level(*this);
  for (const Statement& statement : block)
    if (const Flow flow = execute(statement, frame); flow != Flow::kNormal) return flow;
  return Flow::kNormal;
}

std::string Machine::captured(const Block& block, Frame& frame) {
  std::string outer = std::exchange(out_, "");
  Scope scope(*this, &frame);
  execute(block, scope.frame());
  return std::exchange(out_, std::move(outer));
}

Machine::Flow Machine::execute(const Statement& statement, Frame& frame) {
  line_ = statement.line;
  step();
  using Kind = Statement::Kind;
  switch (statement.kind) {
    case Kind::kText: out_ += statement.text; break;
    case Kind::kOutput: out_ += to_text(evaluate(statement.expressions[0], frame)); break;
    case Kind::kIf:
      for (size_t i = 0; i < statement.bodies.size(); ++i)
        if (is_true(evaluate(statement.expressions[i], frame))) return execute(statement.bodies[i], frame);
      return execute(statement.otherwise, frame);
    case Kind::kFor: {
      const Value items = evaluate(statement.expressions[1], frame);
      execute_for(statement, items, frame, 0);
      break;
    }
    case Kind::kSet:
      assign(statement.expressions[0], evaluate(statement.expressions[1], frame), frame);
      break;
    case Kind::kSetBlock: {
      Value value = text(captured(statement.bodies[0], frame));
      if (statement.expressions.size() > 1) value = evaluate_filter(statement.expressions[1], value, frame);
      assign(statement.expressions[0], value, frame);
      break;
    }
    case Kind::kMacro: frame.set(statement.text, make_macro(statement, frame)); break;
    case Kind::kCall: {
      const Expression& call_of = statement.expressions.back();
      const Value callee = evaluate(call_of.operands[0], frame);
      Arguments arguments = arguments_of(call_of, frame);
      arguments.named.emplace_back("caller", make_macro(statement, frame));
      out_ += to_text(call(callee, std::move(arguments)));
      break;
    }
    case Kind::kFilterBlock: {
      const Value value = text(captured(statement.bodies[0], frame));
      out_ += to_text(evaluate_filter(statement.expressions[0], value, frame));
      break;
    }
    case Kind::kWith: {
      Scope scope(*this, &frame);
      for (size_t i = 0; i + 1 < statement.expressions.size(); i += 2)
        assign(statement.expressions[i], evaluate(statement.expressions[i + 1], frame), scope.frame());
      return execute(statement.bodies[0], scope.frame());
    }
    case Kind::kScope: {
      Scope scope(*this, &frame);
      execute(statement.bodies[0], scope.frame());
      break;
    }
    case Kind::kBreak: return Flow::kBreak;
    case Kind::kContinue: return Flow::kContinue;
  }
  if (out_.size() > kLongestText) fail("it makes a text that is too long");
  return Flow::kNormal;
}

Machine::Flow Machine::execute_for(const Statement& statement, const Value& value, Frame& frame,
                                   int64_t level) {
  std::vector<Value> items = items_of(value);
  if (statement.expressions.size() > 2) {
    std::vector<Value> chosen;
    for (Value& item : items) {
      Scope scope(*this, &frame);
      assign(statement.expressions[0], item, scope.frame());
      if (is_true(evaluate(statement.expressions[2], scope.frame()))) chosen.push_back(std::move(item));
    }
    items = std::move(chosen);
  }
  if (items.empty()) {
    Scope scope(*this, &frame);
    return execute(statement.otherwise, scope.frame());
  }
  Loop& loop = make<Loop>();
  loop.items = std::move(items);
  loop.level = level;
  if (statement.recursive) {
    loop.statement = &statement;
    loop.frame = &frame;
    for (Frame* outer = &frame; outer; outer = outer->parent) outer->captured = true;
  }
  for (; loop.index < loop.items.size(); ++loop.index) {
    Scope scope(*this, &frame);
    scope.frame().variables.emplace_back("loop", Value::object(&loop));
    assign(statement.expressions[0], loop.items[loop.index], scope.frame());
    if (execute(statement.bodies[0], scope.frame()) == Flow::kBreak) break;
  }
  return Flow::kNormal;
}

void Machine::assign(const Expression& target, const Value& value, Frame& frame) {
  step();
  if (target.kind == Expression::Kind::kName) {
    frame.set(target.name, value);
  } else if (target.kind == Expression::Kind::kAttribute) {
    const Value base = evaluate(target.operands[0], frame);
    auto* name_space = base.is(Value::Kind::kObject) ? dynamic_cast<Namespace*>(base.as_object()) : nullptr;
    if (!name_space) fail("`set` of an attribute of ", base.type_name(), ", expected a namespace");
    name_space->attributes[target.name] = value;
  } else {
    const std::vector<Value> items = items_of(value);
    if (items.size() != target.operands.size())
      fail("`set` has ", target.operands.size(), " names, but ", items.size(), " values");
    for (size_t i = 0; i < items.size(); ++i) assign(target.operands[i], items[i], frame);
  }
}

Value Machine::make_macro(const Statement& statement, Frame& frame) {
  Macro& macro = make<Macro>();
  macro.definition = &statement;
  macro.frame = &frame;
  const size_t num_defaults = statement.expressions.size() - (statement.kind == Statement::Kind::kCall);
  for (size_t i = 0; i < num_defaults; ++i) macro.defaults.push_back(Value());
  for (Frame* outer = &frame; outer; outer = outer->parent) outer->captured = true;
  return Value::object(&macro);
}

Value Machine::call_macro(const Macro& macro, Arguments arguments) {
  const Level level(*this);
  const Statement& definition = *macro.definition;
  const size_t num_names = definition.names.size();
  const size_t num_required = num_names - macro.defaults.size();
  Scope scope(*this, macro.frame);
  Frame& frame = scope.frame();
  std::vector<Value> extra;
  for (size_t i = 0; i < arguments.positional.size(); ++i) {
    if (i < num_names) frame.set(definition.names[i], arguments.positional[i]);
    else extra.push_back(arguments.positional[i]);
  }
  const auto has = [&](const std::string& name) {
    return std::any_of(frame.variables.begin(), frame.variables.end(),
                       [&](const auto& variable) { return variable.first == name; });
  };
  std::vector<std::pair<Value, Value>> extra_named;
  for (auto& [name, value] : arguments.named) {
    const bool known =
        std::find(definition.names.begin(), definition.names.end(), name) != definition.names.end();
    if (name == "caller" && definition.uses_caller && !known) frame.set(name, value);
    else if (!known && definition.uses_kwargs) extra_named.emplace_back(Value::text(name), value);
    else if (!known)
      fail("macro ", bough::quoted(definition.text), " takes no argument ", bough::quoted(name));
    else if (has(name))
      fail("macro ", bough::quoted(definition.text), " got ", bough::quoted(name), " twice");
    else frame.set(name, value);
  }
  if (!extra.empty() && !definition.uses_varargs)
    fail("macro ", bough::quoted(definition.text), " takes ", num_names, " arguments, got ",
         arguments.positional.size());
  if (definition.uses_varargs)
    frame.set("varargs", Value::sequence(Sequence::Flavour::kTuple, std::move(extra)));
  if (definition.uses_kwargs) frame.set("kwargs", Value::dict(std::move(extra_named)));
  if (definition.uses_caller && !has("caller")) frame.set("caller", Value::undefined("caller"));
  for (size_t i = 0; i < num_names; ++i) {
    const std::string& name = definition.names[i];
    if (has(name)) continue;
    // The default of a parameter is evaluated at each call of the macro. It may use the parameters before it.
    frame.set(name, i < num_required ? Value::undefined(name)
                                     : evaluate(definition.expressions[i - num_required], frame));
  }
  std::string outer = std::exchange(out_, "");
  execute(definition.bodies[0], frame);
  return text(std::exchange(out_, std::move(outer)));
}

Arguments Machine::arguments_of(const Expression& expression, Frame& frame) {
  Arguments arguments;
  const size_t num_positional = expression.operands.size() - expression.names.size();
  for (size_t i = 1; i < expression.operands.size(); ++i) {
    Value value = evaluate(expression.operands[i], frame);
    if (i < num_positional) arguments.positional.push_back(std::move(value));
    else arguments.named.emplace_back(expression.names[i - num_positional], std::move(value));
  }
  return arguments;
}

Value Machine::evaluate_filter(const Expression& expression, const Value& value, Frame& frame) {
  // In the filter chain of a block, the operand of the innermost filter is a placeholder (a literal). The
  // input of this filter is `value`, the block's text.
  const Value input = expression.operands[0].kind == Expression::Kind::kFilter
                          ? evaluate_filter(expression.operands[0], value, frame)
                          : value;
  return filter(expression.name, input, arguments_of(expression, frame));
}

Value Machine::evaluate(const Expression& expression, Frame& frame) {
  const Level level(*this);
  step();
  line_ = expression.line;
  using Kind = Expression::Kind;
  const auto operand = [&](size_t i) { return evaluate(expression.operands[i], frame); };
  switch (expression.kind) {
    case Kind::kLiteral: return expression.value;
    case Kind::kName:
      if (const Value* value = frame.find(expression.name)) return *value;
      if (is_function(expression.name)) return Value::function(expression.name);
      return Value::undefined(expression.name);
    case Kind::kAttribute: return attribute(operand(0), expression.name);
    case Kind::kSubscript: {
      const Value base = operand(0);
      return subscript(base, operand(1));
    }
    case Kind::kSlice: return evaluate_slice(expression, frame);
    case Kind::kCall: return evaluate_call(expression, frame);
    case Kind::kFilter: {
      const Value value = operand(0);
      return filter(expression.name, value, arguments_of(expression, frame));
    }
    case Kind::kTest: {
      const Value value = operand(0);
      return Value::boolean(test(expression.name, value, arguments_of(expression, frame)));
    }
    case Kind::kList:
    case Kind::kTuple: {
      std::vector<Value> items;
      for (size_t i = 0; i < expression.operands.size(); ++i) items.push_back(operand(i));
      return Value::sequence(
          expression.kind == Kind::kList ? Sequence::Flavour::kList : Sequence::Flavour::kTuple,
          std::move(items));
    }
    case Kind::kDict: {
      std::vector<std::pair<Value, Value>> items;
      for (size_t i = 0; i < expression.operands.size(); i += 2) {
        Value key = operand(i), value = operand(i + 1);
        if (!is_hashable(key)) fail(key.type_name(), " cannot be a key of a dict");
        const auto same = std::find_if(items.begin(), items.end(),
                                       [&](const auto& item) { return equal(item.first, key); });
        if (same != items.end()) same->second = std::move(value);
        else items.emplace_back(std::move(key), std::move(value));
      }
      return Value::dict(std::move(items));
    }
    case Kind::kUnary: return unary(expression.name, operand(0));
    case Kind::kBinary: {
      const Value left = operand(0);
      if (expression.name == "and") return is_true(left) ? operand(1) : left;
      if (expression.name == "or") return is_true(left) ? left : operand(1);
      return binary(expression.name, left, operand(1));
    }
    case Kind::kCompare: {
      Value left = operand(0);
      for (size_t i = 0; i < expression.names.size(); ++i) {
        Value right = operand(i + 1);
        if (!compare_values(expression.names[i], left, right)) return Value::boolean(false);
        left = std::move(right);
      }
      return Value::boolean(true);
    }
    case Kind::kInlineIf:
      if (is_true(operand(0))) return operand(1);
      return expression.operands.size() > 2 ? operand(2) : Value::undefined("an `if` without `else`");
  }
  return {};
}

Value Machine::evaluate_call(const Expression& expression, Frame& frame) {
  const Value callee = evaluate(expression.operands[0], frame);
  Arguments arguments = arguments_of(expression, frame);
  line_ = expression.line;
  return call(callee, std::move(arguments));
}

Value Machine::unary(const std::string& operation, const Value& value) {
  if (operation == "not") return Value::boolean(!is_true(value));
  if (!value.is_number()) fail("the sign ", operation, " needs a number, got ", value.type_name());
  const int sign = operation == "-" ? -1 : 1;
  if (!value.is_whole()) return Value::number(sign * value.as_float());
  if (value.as_integer() == INT64_MIN) fail("a whole number beyond 64 bits is not supported");
  return Value::integer(sign * value.as_integer());
}

bool Machine::compare_values(const std::string& operation, const Value& a, const Value& b) {
  step(1 + std::min(a.weight(), b.weight()) / 64);
  if (operation == "==") return equal(a, b);
  if (operation == "!=") return !equal(a, b);
  if (operation == "in") return contains(b, a);
  if (operation == "not in") return !contains(b, a);
  const int order = compare(a, b);
  if (operation == "<") return order < 0;
  if (operation == "<=") return order <= 0;
  return operation == ">" ? order > 0 : order >= 0;
}

Value Machine::binary(const std::string& operation, const Value& a, const Value& b) {
  if (operation == "~") {
    std::string left = to_text(a);
    return text(left += to_text(b));
  }
  const auto escaped = [&](const Value& value) {
    return value.is_markup() ? value.as_text() : filter("escape", value, {}).as_text();
  };
  if (operation == "+" && a.is_text() && b.is_text()) {
    if (!a.is_markup() && !b.is_markup()) return text(a.as_text() + b.as_text());
    return text(escaped(a) + escaped(b), true);
  }
  if (operation == "+" && a.is_sequence() && b.is_sequence() &&
      a.as_sequence().flavour == b.as_sequence().flavour &&
      (a.is(Sequence::Flavour::kList) || a.is(Sequence::Flavour::kTuple))) {
    std::vector<Value> items = a.as_sequence().items;
    const std::vector<Value>& more = b.as_sequence().items;
    items.insert(items.end(), more.begin(), more.end());
    step(static_cast<int64_t>(items.size()));
    return Value::sequence(a.as_sequence().flavour, std::move(items));
  }
  if (operation == "%" && a.is_text()) return format_percent(a, b);
  if (operation == "*" && (a.is_whole() != b.is_whole())) {
    const Value& repeated = a.is_whole() ? b : a;
    const int64_t count = std::max<int64_t>(0, (a.is_whole() ? a : b).as_integer());
    if (repeated.is_text()) {
      const std::string& once = repeated.as_text();
      if (!once.empty() && static_cast<uint64_t>(count) > kLongestText / once.size())
        fail("it makes a text that is too long");
      std::string out;
      for (int64_t i = 0; i < count && !once.empty(); ++i) out += once;
      return text(std::move(out), repeated.is_markup());
    }
    if (repeated.is(Sequence::Flavour::kList) || repeated.is(Sequence::Flavour::kTuple)) {
      std::vector<Value> items;
      for (int64_t i = 0; i < count && !repeated.as_sequence().items.empty(); ++i) {
        for (const Value& item : repeated.as_sequence().items) items.push_back(item);
        step(static_cast<int64_t>(repeated.as_sequence().items.size()));
      }
      return Value::sequence(repeated.as_sequence().flavour, std::move(items));
    }
  }
  return arithmetic(operation, a, b);
}

Value Machine::arithmetic(const std::string& operation, const Value& a, const Value& b) {
  if (!a.is_number() || !b.is_number())
    fail(bough::quoted(operation), " of ", a.type_name(), a.is_undefined() ? " (" + a.name() + ")" : "",
         " and ", b.type_name(), b.is_undefined() ? " (" + b.name() + ")" : "");
  const bool whole = a.is_whole() && b.is_whole();
  if ((operation == "/" || operation == "//" || operation == "%") && b.as_float() == 0)
    fail("division by zero");
  if (whole && operation != "/" && !(operation == "**" && b.as_integer() < 0)) {
    const int64_t x = a.as_integer();
    const int64_t y = b.as_integer();
    int64_t result = 0;
    bool overflow = false;
    if (operation == "+") overflow = __builtin_add_overflow(x, y, &result);
    else if (operation == "-") overflow = __builtin_sub_overflow(x, y, &result);
    else if (operation == "*") overflow = __builtin_mul_overflow(x, y, &result);
    else if (operation == "**") {
      result = 1;
      if (y > 64 && (x > 1 || x < -1)) overflow = true;
      const int64_t count = y > 64 ? y % 2 + 2 : y;  // for 0, 1 and -1 only the parity matters
      for (int64_t i = 0; i < count && !overflow; ++i) overflow = __builtin_mul_overflow(result, x, &result);
    } else if (y == -1) {
      if (operation == "//") overflow = __builtin_sub_overflow(int64_t{0}, x, &result);
    } else {
      const int64_t remainder = (x % y + y) % y;  // division rounds down, as in Python
      result = operation == "%" ? remainder : (x - remainder) / y;
    }
    if (overflow) fail("a whole number beyond 64 bits is not supported");
    return Value::integer(result);
  }
  const double x = a.as_float();
  const double y = b.as_float();
  if (operation == "+") return Value::number(x + y);
  if (operation == "-") return Value::number(x - y);
  if (operation == "*") return Value::number(x * y);
  if (operation == "/") return Value::number(x / y);
  if (operation == "**") fail("a power of floats is not supported");
  double remainder = std::fmod(x, y);
  if (remainder != 0 && (remainder < 0) != (y < 0)) remainder += y;
  if (operation == "%") return Value::number(remainder == 0 ? std::copysign(0.0, y) : remainder);
  const double quotient = (x - remainder) / y;
  const double floor = std::floor(quotient);
  return Value::number(quotient == 0            ? std::copysign(0.0, x / y)
                       : quotient - floor > 0.5 ? floor + 1
                                                : floor);
}

Value Machine::evaluate_slice(const Expression& expression, Frame& frame) {
  const Value base = evaluate(expression.operands[0], frame);
  Value bounds[3];
  for (size_t i = 0; i < 3; ++i) bounds[i] = evaluate(expression.operands[i + 1], frame);
  if (base.is_undefined()) fail(base.name(), " is undefined");
  const bool sliced = base.is_text() || base.is(Sequence::Flavour::kList) ||
                      base.is(Sequence::Flavour::kTuple) || base.is(Sequence::Flavour::kRange);
  if (!sliced) fail(base.type_name(), " cannot be sliced");
  for (const Value& bound : bounds)
    if (!bound.is_none() && !bound.is_whole())
      fail("a bound of a slice must be a whole number, got ", bound.type_name());
  std::vector<Value> items = items_of(base);
  const int64_t size = static_cast<int64_t>(items.size());
  const int64_t step_of = bounds[2].is_none() ? 1 : bounds[2].as_integer();
  if (step_of == 0) fail("the step of a slice is 0");
  if (step_of > size + 1 || step_of < -size - 1) fail("a slice with such a large step is not supported");
  const auto bound = [&](const Value& value, int64_t otherwise) {
    if (value.is_none()) return otherwise;
    const int64_t index = value.as_integer() < 0 ? value.as_integer() + size : value.as_integer();
    return step_of > 0 ? std::clamp<int64_t>(index, 0, size) : std::clamp<int64_t>(index, -1, size - 1);
  };
  const int64_t begin = bound(bounds[0], step_of > 0 ? 0 : size - 1);
  const int64_t end = bound(bounds[1], step_of > 0 ? size : -1);
  std::vector<Value> out;
  std::string out_text;
  for (int64_t i = begin; step_of > 0 ? i < end : i > end; i += step_of) {
    if (base.is_text()) out_text += items[static_cast<size_t>(i)].as_text();
    else out.push_back(items[static_cast<size_t>(i)]);
  }
  if (base.is_text()) return text(std::move(out_text), base.is_markup());
  return Value::sequence(base.as_sequence().flavour, std::move(out));
}

std::string render(const Block& program, const Value& variables, const std::string& name, std::time_t now) {
  Machine machine(variables, now);
  try {
    return machine.run(program);
  } catch (const Error& error) {
    throw UserError(str(name, ":", machine.line(), ": chat template: ", error.what));
  }
}

}  // namespace bough::jinja
