// The machine that runs a template. Its code is in
//   - chat_template_jinja.cpp: names, scopes, statements, expressions
//   - chat_template_builtins.cpp: built-in functions and methods of Python and Jinja
//   - chat_template_filters.cpp: filters and tests
#pragma once

#include <ctime>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "text/chat_template_jinja.h"

namespace bough::jinja {

// The variables of one scope. A scope in which a macro was defined (`captured`) lives until the machine ends.
// Any other scope ends when execution leaves it.
struct Frame {
  Frame* parent = nullptr;
  std::vector<std::pair<std::string, Value>> variables;
  bool captured = false;

  Value* find(std::string_view name);
  void set(const std::string& name, Value value);
};

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;

  // Returns the arguments for the parameters `names`, in this order; undefined for a parameter that was not
  // given. Throws Error if there are too many arguments or an unknown name. Messages call the function
  // `what`.
  std::vector<Value> bind(const std::string& what, std::initializer_list<std::string_view> names) const;
};

struct Namespace final : Object {
  std::string_view type() const override { return "a namespace"; }
  std::map<std::string, Value> attributes;
};

struct Macro final : Object {
  std::string_view type() const override { return "a macro"; }
  const Statement* definition = nullptr;
  Frame* frame = nullptr;
  std::vector<Value> defaults;
};

struct Loop final : Object {
  std::string_view type() const override { return "a loop"; }
  std::vector<Value> items;
  size_t index = 0;
  int64_t level = 0;
  const Statement* statement = nullptr;  // for recursive loops
  Frame* frame = nullptr;
  std::vector<Value> last_changed;
  bool has_changed = false;
};

struct Cycler final : Object {
  std::string_view type() const override { return "a cycler"; }
  std::vector<Value> items;
  size_t position = 0;
};

struct Joiner final : Object {
  std::string_view type() const override { return "a joiner"; }
  std::string separator;
  bool used = false;
};

class Machine {
 public:
  Machine(const Value& variables, std::time_t now);

  std::string run(const Block& program);
  int line() const { return line_; }

 private:
  enum class Flow { kNormal, kBreak, kContinue };
  class Scope;  // a frame while it is open
  class Level;  // counts recursion

  Flow execute(const Block& block, Frame& frame);
  Flow execute(const Statement& statement, Frame& frame);
  Flow execute_for(const Statement& statement, const Value& items, Frame& frame, int64_t level);
  std::string captured(const Block& block, Frame& frame);
  void assign(const Expression& target, const Value& value, Frame& frame);
  Value make_macro(const Statement& statement, Frame& frame);
  Value call_macro(const Macro& macro, Arguments arguments);

  Value evaluate(const Expression& expression, Frame& frame);
  Value evaluate_call(const Expression& expression, Frame& frame);
  Value evaluate_slice(const Expression& expression, Frame& frame);
  Value evaluate_filter(const Expression& expression, const Value& value, Frame& frame);
  Arguments arguments_of(const Expression& expression, Frame& frame);
  Value unary(const std::string& operation, const Value& value);
  Value binary(const std::string& operation, const Value& a, const Value& b);
  Value arithmetic(const std::string& operation, const Value& a, const Value& b);
  bool compare_values(const std::string& operation, const Value& a, const Value& b);

  // In chat_template_builtins.cpp and chat_template_filters.cpp.
  static bool is_function(std::string_view name);
  Value attribute(const Value& base, const std::string& name);
  Value subscript(const Value& base, const Value& key);
  bool contains(const Value& container, const Value& item);
  std::vector<Value> items_of(const Value& value);  // throws Error if Python cannot iterate over `value`
  int64_t length_of(const Value& value);
  Value call(const Value& callee, Arguments arguments);
  Value call_function(const std::string& name, const Arguments& arguments);
  Value call_object(Object& object, const Arguments& arguments);
  Value call_method(const Value& self, const std::string& name, const Arguments& arguments);
  Value text_method(const Value& self, const std::string& name, const Arguments& arguments);
  Value object_attribute(Object& object, const std::string& name);
  Value filter(const std::string& name, const Value& value, const Arguments& arguments);
  Value text_filter(const std::string& name, const Value& value, const Arguments& arguments, bool& found);
  Value sequence_filter(const std::string& name, const Value& value, const Arguments& arguments, bool& found);
  Value selected(const std::string& name, const Value& value, const Arguments& arguments);
  Value mapped(const Value& value, const Arguments& arguments);
  Value sorted(const Value& value, const Arguments& arguments);
  Value attribute_path(const Value& value, const Value& path);
  Value sort_key(const Value& value, const Value& path, bool case_sensitive);
  bool test(const std::string& name, const Value& value, const Arguments& arguments);
  Value format_percent(const Value& format, const Value& arguments);

  Value text(std::string text, bool markup = false);  // counts its size as steps
  void step(int64_t count = 1);

  template <class T>
  T& make() {
    auto owned = std::make_unique<T>();
    T& result = *owned;
    objects_.push_back(std::move(owned));
    step(10);
    return result;
  }
  Frame& new_frame(Frame* parent);

  Frame globals_;
  std::vector<std::unique_ptr<Object>> objects_;
  std::vector<std::unique_ptr<Frame>> frames_;  // open ones and captured ones
  std::time_t now_;
  std::string out_;
  int64_t num_steps_ = 0;
  int depth_ = 0;
  int line_ = 1;
};

}  // namespace bough::jinja
