#include "models/chat_template_jinja.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "models/unicode_text.h"

namespace bough::jinja {
namespace {

const Json kUndefined(Json::value_t::discarded);

bool is_true(const Json& value) {
  if (value.is_discarded() || value.is_null()) return false;
  if (value.is_boolean()) return value;
  if (value.is_number()) return value != 0;
  if (value.is_string()) return !value.get_ref<const std::string&>().empty();
  return !value.empty();
}

// Whether a strip takes `c`: one of `characters` or, without them, what Python's str.isspace takes:
// White_Space and the ASCII separators.
bool strips(char32_t c, const std::string* characters) {
  if (!characters) return unicode::is_white_space(c) || (c >= 0x1C && c <= 0x1F);
  std::string encoded;
  unicode::append(encoded, c);
  return characters->find(encoded) != std::string::npos;
}

std::string strip(std::string text, bool left, bool right, const std::string* characters) {
  size_t begin = 0;
  while (left && begin < text.size()) {
    const unicode::Decoded next = unicode::decode(std::string_view(text).substr(begin));
    if (!strips(next.code_point, characters)) break;
    begin += next.length;
  }
  text.erase(0, begin);
  while (right && !text.empty()) {
    size_t last = text.size() - 1;
    while (last > 0 && (static_cast<unsigned char>(text[last]) & 0xC0) == 0x80) --last;
    if (!strips(unicode::decode(std::string_view(text).substr(last)).code_point, characters)) break;
    text.resize(last);
  }
  return text;
}

class Machine {
 public:
  Machine(const Json& variables, const std::string& name) : name_(name) {
    scopes_.emplace_back();
    for (const auto& [key, value] : variables.items()) scopes_[0][key] = value;
  }

  void run(const std::vector<Statement>& statements) {
    for (const Statement& statement : statements) run(statement);
  }

  std::string take_output() { return std::move(out_); }

 private:
  using Kind = Expression::Kind;

  [[noreturn]] void fail(const std::string& what) const {
    throw UserError(str(name_, ": chat template: ", what));
  }
  [[noreturn]] void unsupported(const std::string& what) const { fail(str(what, " is not supported")); }

  void run(const Statement& statement) {
    if (++num_steps_ > kMostSteps) fail("takes too many steps");
    switch (statement.kind) {
      case Statement::Kind::kText: out_ += statement.text; break;
      case Statement::Kind::kOutput: out_ += printed(evaluate(statement.expressions[0])); break;
      case Statement::Kind::kIf:
        run(is_true(evaluate(statement.expressions[0])) ? statement.body : statement.otherwise);
        break;
      case Statement::Kind::kBlock: run(statement.body); break;
      case Statement::Kind::kFor: run_for(statement); break;
      case Statement::Kind::kSet: assign(statement.expressions[0], evaluate(statement.expressions[1])); break;
    }
  }

  void run_for(const Statement& statement) {
    const Json items = evaluate(statement.expressions[0]);
    if (items.is_discarded()) return;  // an undefined value is an empty list
    if (!items.is_array()) unsupported("a loop over something that is not a list");
    for (size_t i = 0; i < items.size(); ++i) {
      num_steps_ += kStepsOfIteration;
      scopes_.emplace_back();
      scopes_.back()[statement.text] = items[i];
      scopes_.back()["loop"] = {{"index0", i},
                                {"index", i + 1},
                                {"first", i == 0},
                                {"last", i + 1 == items.size()},
                                {"length", items.size()},
                                {"revindex0", items.size() - 1 - i},
                                {"revindex", items.size() - i}};
      // The neighbours are undefined at the ends, as in Jinja.
      if (i > 0) scopes_.back()["loop"]["previtem"] = items[i - 1];
      if (i + 1 < items.size()) scopes_.back()["loop"]["nextitem"] = items[i + 1];
      run(statement.body);
      scopes_.pop_back();
    }
  }

  Json* find(const std::string& name) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope)
      if (const auto entry = scope->find(name); entry != scope->end()) return &entry->second;
    return nullptr;
  }

  void assign(const Expression& target, Json value) {
    if (target.kind == Kind::kName) {
      scopes_.back()[target.name] = std::move(value);
      return;
    }
    Json* object = find(target.operands[0].name);
    if (!object || !object->is_object())
      fail(str(bough::quoted(target.operands[0].name), " is not a namespace"));
    (*object)[target.name] = std::move(value);
  }

  // Returns the value in place where it has one, so that a conversation is not copied at every mention; else
  // nullptr.
  const Json* in_place(const Expression& e) {
    if (e.kind == Kind::kLiteral) return &e.value;
    if (e.kind == Kind::kName) {
      const Json* value = find(e.name);
      return value ? value : &kUndefined;
    }
    if (e.kind != Kind::kAttribute && e.kind != Kind::kSubscript) return nullptr;
    const Json* base = in_place(e.operands[0]);
    if (!base) return nullptr;
    return member(*base, e.kind == Kind::kAttribute ? Json(e.name) : evaluate(e.operands[1]));
  }

  const Json* member(const Json& base, const Json& key) {
    if (base.is_discarded())
      fail(str("a member ", bough::quoted(printed(key)), " of an undefined value is asked for"));
    if (base.is_object() && key.is_string()) {
      const auto entry = base.find(key.get_ref<const std::string&>());
      return entry == base.end() ? &kUndefined : &*entry;
    }
    if (base.is_array() && key.is_number_integer()) {
      const int64_t size = static_cast<int64_t>(base.size());
      const int64_t index = key.get<int64_t>() + (key.get<int64_t>() < 0 ? size : 0);
      return index < 0 || index >= size ? &kUndefined : &base[static_cast<size_t>(index)];
    }
    if (base.is_string() && key.is_number_integer()) unsupported("a subscript of a string");
    return &kUndefined;
  }

  Json evaluate(const Expression& e) {
    if (const Json* value = in_place(e)) return *value;
    switch (e.kind) {
      case Kind::kAttribute: return *member(evaluate(e.operands[0]), Json(e.name));
      case Kind::kSubscript: return *member(evaluate(e.operands[0]), evaluate(e.operands[1]));
      case Kind::kSlice: return slice(e);
      case Kind::kCall: return call(e);
      case Kind::kFilter: return filter(e);
      case Kind::kTest: return test(e.name, evaluate(e.operands[0]));
      case Kind::kList: {
        Json list = Json::array();
        for (const Expression& item : e.operands) list.push_back(evaluate(item));
        return list;
      }
      case Kind::kUnary: {
        const Json value = evaluate(e.operands[0]);
        if (e.name == "not") return !is_true(value);
        return -integer(value);
      }
      case Kind::kBinary: return binary(e);
      case Kind::kInlineIf: return evaluate(e.operands[is_true(evaluate(e.operands[0])) ? 1 : 2]);
      default: BOUGH_CHECK(false, "expression of kind ", static_cast<int>(e.kind)); return {};
    }
  }

  Json binary(const Expression& e) {
    const std::string& operation = e.name;
    Json left = evaluate(e.operands[0]);
    if (operation == "and") return is_true(left) ? evaluate(e.operands[1]) : left;
    if (operation == "or") return is_true(left) ? left : evaluate(e.operands[1]);
    const Json right = evaluate(e.operands[1]);
    if (operation == "==") return equal(left, right);
    if (operation == "!=") return !equal(left, right);
    if (operation == "in") return contains(right, left);
    if (operation == "~" || (operation == "+" && left.is_string() && right.is_string()))
      return concatenated(printed(left), printed(right));
    if (operation == "+" && left.is_array() && right.is_array()) {
      left.insert(left.end(), right.begin(), right.end());
      return left;
    }
    const bool strings = left.is_string() && right.is_string();
    if (operation == "<") return strings ? left < right : integer(left) < integer(right);
    if (operation == ">") return strings ? left > right : integer(left) > integer(right);
    if (operation == "<=") return strings ? left <= right : integer(left) <= integer(right);
    if (operation == ">=") return strings ? left >= right : integer(left) >= integer(right);
    const int64_t a = integer(left);
    const int64_t b = integer(right);
    int64_t result = 0;
    if (operation == "+" && !__builtin_add_overflow(a, b, &result)) return result;
    if (operation == "-" && !__builtin_sub_overflow(a, b, &result)) return result;
    if (operation == "*" && !__builtin_mul_overflow(a, b, &result)) return result;
    // Division rounds down, as Python's does; its one overflow is excluded by the second condition.
    if ((operation == "//" || operation == "%") && b != 0 && b != -1) {
      const int64_t remainder = (a % b + b) % b;
      return operation == "%" ? remainder : (a - remainder) / b;
    }
    fail(str("arithmetic that is not supported: ", a, " ", operation, " ", b));
  }

  std::string concatenated(std::string left, const std::string& right) const {
    if (left.size() + right.size() > kLongestText) fail("makes a text that is too long");
    return left += right;
  }

  static bool equal(const Json& a, const Json& b) {
    if (a.is_discarded() || b.is_discarded()) return a.is_discarded() && b.is_discarded();
    return a == b;
  }

  bool contains(const Json& container, const Json& item) {
    if (container.is_string() && item.is_string())
      return container.get_ref<const std::string&>().find(item.get_ref<const std::string&>()) !=
             std::string::npos;
    if (container.is_object() && item.is_string()) return container.contains(item.get<std::string>());
    if (container.is_array())
      return std::any_of(container.begin(), container.end(),
                         [&](const Json& other) { return equal(other, item); });
    if (container.is_discarded()) return false;
    fail("`in` on something that holds nothing");
  }

  int64_t integer(const Json& value) {
    if (!value.is_number_integer())
      fail(str("arithmetic on ", bough::quoted(shown(value)), ", which is no whole number"));
    return value;
  }

  static std::string shown(const Json& value) {
    return value.is_discarded() ? "undefined" : dump_line(value);
  }

  std::string printed(const Json& value) {
    if (value.is_discarded()) return "";
    if (value.is_string()) return value;
    if (value.is_boolean()) return value ? "True" : "False";
    if (value.is_null()) return "None";
    if (value.is_number_integer()) return std::to_string(value.get<int64_t>());
    unsupported("printing a list or an object");
  }

  Json slice(const Expression& e) {
    const Json base = evaluate(e.operands[0]);
    if (!base.is_array()) unsupported("a slice of something that is not a list");
    const int64_t size = static_cast<int64_t>(base.size());
    const Json given_step = evaluate(e.operands[3]);
    const int64_t step = given_step.is_discarded() ? 1 : integer(given_step);
    if (step != 1 && step != -1) unsupported("a slice with a step");
    const auto bound = [&](const Expression& operand, int64_t otherwise) {
      const Json value = evaluate(operand);
      if (value.is_discarded() || value.is_null()) return otherwise;
      const int64_t index = integer(value) + (integer(value) < 0 ? size : 0);
      return step > 0 ? std::clamp<int64_t>(index, 0, size) : std::clamp<int64_t>(index, -1, size - 1);
    };
    const int64_t begin = bound(e.operands[1], step > 0 ? 0 : size - 1);
    const int64_t end = bound(e.operands[2], step > 0 ? size : -1);
    Json out = Json::array();
    for (int64_t i = begin; step > 0 ? i < end : i > end; i += step)
      out.push_back(base[static_cast<size_t>(i)]);
    return out;
  }

  Json filter(const Expression& e) {
    const Json value = evaluate(e.operands[0]);
    if (e.operands.size() > 1) unsupported(str("an argument of the filter ", bough::quoted(e.name)));
    if (e.name == "trim" && value.is_string()) return strip(value, true, true, nullptr);
    if (e.name == "length" && (value.is_array() || value.is_object())) return value.size();
    if (e.name == "length" && value.is_string()) {
      const std::string text = value;
      return std::count_if(text.begin(), text.end(),
                           [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
    }
    if (e.name == "first" && value.is_array()) return value.empty() ? kUndefined : value.front();
    if (e.name == "last" && value.is_array()) return value.empty() ? kUndefined : value.back();
    unsupported(str("the filter ", bough::quoted(e.name)));
  }

  Json test(const std::string& name, const Json& value) {
    if (name == "defined") return !value.is_discarded();
    if (name == "undefined") return value.is_discarded();
    if (name == "string") return value.is_string();
    if (name == "none") return value.is_null();
    if (name == "mapping") return value.is_object();
    if (name == "sequence" || name == "iterable")
      return value.is_array() || value.is_string() || value.is_object();
    if (name == "number") return value.is_number() || value.is_boolean();
    if (name == "boolean") return value.is_boolean();
    if (name == "true") return value.is_boolean() && value == true;
    if (name == "false") return value.is_boolean() && value == false;
    unsupported(str("the test ", bough::quoted(name)));
  }

  Json call(const Expression& e) {
    const Expression& callee = e.operands[0];
    const size_t num_positional = e.operands.size() - 1 - e.keywords.size();
    if (callee.kind == Kind::kName && callee.name == "namespace" && num_positional == 0) {
      Json object = Json::object();
      for (size_t i = 0; i < e.keywords.size(); ++i) object[e.keywords[i]] = evaluate(e.operands[1 + i]);
      return object;
    }
    if (!e.keywords.empty()) unsupported("a call with named arguments");
    if (callee.kind == Kind::kName && callee.name == "raise_exception" && num_positional == 1)
      fail(str("refuses the conversation: ", printed(evaluate(e.operands[1]))));
    if (callee.kind != Kind::kAttribute) unsupported(str("the function ", bough::quoted(callee.name)));
    const Json object = evaluate(callee.operands[0]);
    if (!object.is_string())
      unsupported(str("the method ", bough::quoted(callee.name), " of ", bough::quoted(shown(object))));
    const bool has_argument = num_positional == 1;
    const Json argument = has_argument ? evaluate(e.operands[1]) : kUndefined;
    if (num_positional > 1 || (has_argument && !argument.is_string()))
      unsupported(str("the method ", bough::quoted(callee.name), " with these arguments"));
    return method(callee.name, object, has_argument ? &argument.get_ref<const std::string&>() : nullptr);
  }

  Json method(const std::string& name, const std::string& text, const std::string* argument) {
    if (name == "strip") return strip(text, true, true, argument);
    if (name == "lstrip") return strip(text, true, false, argument);
    if (name == "rstrip") return strip(text, false, true, argument);
    if (name == "startswith" && argument) return text.starts_with(*argument);
    if (name == "endswith" && argument) return text.ends_with(*argument);
    if (name == "split" && argument && !argument->empty()) {
      Json parts = Json::array();
      size_t begin = 0;
      for (size_t end; (end = text.find(*argument, begin)) != std::string::npos;
           begin = end + argument->size())
        parts.push_back(text.substr(begin, end - begin));
      parts.push_back(text.substr(begin));
      return parts;
    }
    unsupported(str("the method ", bough::quoted(name)));
  }

  // Bounds for templates of unknown origin, far beyond what a conversation needs.
  static constexpr int64_t kMostSteps = 1'000'000;
  static constexpr int64_t kStepsOfIteration = 10;         // what its `loop` costs
  static constexpr size_t kLongestText = size_t{1} << 26;  // bytes

  const std::string& name_;
  int64_t num_steps_ = 0;
  std::vector<std::map<std::string, Json>> scopes_;
  std::string out_;
};

}  // namespace

std::string render(const std::vector<Statement>& program, const Json& variables, const std::string& name) {
  Machine machine(variables, name);
  machine.run(program);
  return machine.take_output();
}

}  // namespace bough::jinja
