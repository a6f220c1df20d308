// The values of a chat template: Python's, as far as Jinja shows them.
//
// A value is immutable and cheap to copy: texts, sequences and dicts are shared. Namespaces and other objects
// with a state belong to the machine that runs the template; a value only points to them, so that no cycle of
// owners can arise. Nesting and weight are bounded when a sequence or a dict is made, so that walking one
// recursively is safe and ends.
//
// What Python would refuse, and what is not supported, throws jinja::Error; whoever runs the template adds
// its name and the line.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bough {

// JSON whose objects keep the order of their keys, which templates show to the model.
using OrderedJson = nlohmann::ordered_json;

namespace jinja {

struct Error {
  std::string what;
};
template <class... Args>
[[noreturn]] void fail(const Args&... args);

class Value;

struct Text {
  std::string text;
  bool markup = false;  // went through `safe` or `escape`: what is added to it is escaped
};

struct Sequence {
  // A view is of a dict's keys, values or items. A generator can be read once, has no length and is true.
  enum class Flavour { kList, kTuple, kView, kRange, kGenerator };
  Flavour flavour;
  std::vector<Value> items;
  int depth;
  int64_t weight;
  mutable bool consumed = false;  // of generators
};

struct Dict {
  std::vector<std::pair<Value, Value>> items;
  int depth;
  int64_t weight;
  const Value* find(const Value& key) const;
  const Value* find(std::string_view key) const;
};

// Something with a state, owned by the machine: a namespace, a macro, a loop, ...
struct Object {
  virtual ~Object() = default;
  virtual std::string_view type() const = 0;
};

struct Method;

class Value {
 public:
  enum class Kind : uint8_t {
    kUndefined,
    kNone,
    kBool,
    kInteger,
    kFloat,
    kText,
    kSequence,
    kDict,
    kMethod,    // of a text, a sequence or a dict
    kFunction,  // one of Jinja's or transformers' own, by its name
    kObject
  };

  Value() = default;  // undefined
  static Value undefined(std::string what);
  static Value none() { return Value(Kind::kNone); }
  static Value boolean(bool value);
  static Value integer(int64_t value);
  static Value number(double value);
  static Value text(std::string value, bool markup = false);
  static Value sequence(Sequence::Flavour flavour, std::vector<Value> items);
  static Value list(std::vector<Value> items) { return sequence(Sequence::Flavour::kList, std::move(items)); }
  static Value dict(std::vector<std::pair<Value, Value>> items);
  static Value method(Value self, std::string name);
  static Value function(std::string name);
  static Value object(Object* object);
  // Throws Error where the value is nested too deeply, or holds a whole number beyond 64 bits.
  static Value from_json(const OrderedJson& json, int depth = 0);

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }
  bool is_undefined() const { return kind_ == Kind::kUndefined; }
  bool is_none() const { return kind_ == Kind::kNone; }
  bool is_text() const { return kind_ == Kind::kText; }
  bool is_dict() const { return kind_ == Kind::kDict; }
  bool is_sequence() const { return kind_ == Kind::kSequence; }
  bool is(Sequence::Flavour flavour) const { return is_sequence() && as_sequence().flavour == flavour; }
  bool is_whole() const { return kind_ == Kind::kInteger || kind_ == Kind::kBool; }  // a bool is an int
  bool is_number() const { return is_whole() || kind_ == Kind::kFloat; }

  // What the kind promises must hold.
  bool as_bool() const { return whole_ != 0; }
  int64_t as_integer() const { return whole_; }
  double as_float() const { return kind_ == Kind::kFloat ? number_ : static_cast<double>(whole_); }
  const std::string& as_text() const { return static_cast<const Text*>(data_.get())->text; }
  bool is_markup() const { return is_text() && static_cast<const Text*>(data_.get())->markup; }
  const Sequence& as_sequence() const { return *static_cast<const Sequence*>(data_.get()); }
  const Dict& as_dict() const { return *static_cast<const Dict*>(data_.get()); }
  const Method& as_method() const;
  Object* as_object() const { return object_; }
  // The name of a function, or of what is undefined.
  std::string name() const { return data_ ? as_text() : std::string(); }

  int depth() const;       // 0 for what holds nothing
  int64_t weight() const;  // how much there is to walk: values and text, shared parts as often as they occur
  std::string_view type_name() const;

 private:
  explicit Value(Kind kind) : kind_(kind) {}

  Kind kind_ = Kind::kUndefined;
  union {
    int64_t whole_ = 0;
    double number_;
    Object* object_;
  };
  std::shared_ptr<const void> data_;
};

struct Method {
  Value self;
  std::string name;
};

bool is_true(const Value& value);
bool equal(const Value& a, const Value& b);
// Less than 0, 0 or more. Error: the two have no order.
int compare(const Value& a, const Value& b);
bool is_hashable(const Value& value);

// Python's str() and repr().
std::string to_text(const Value& value);
std::string to_repr(const Value& value);

struct JsonFormat {
  bool ensure_ascii = false;
  std::optional<std::string> indent;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
  bool sort_keys = false;
};
// Python's json.dumps.
std::string to_json(const Value& value, const JsonFormat& format);

}  // namespace jinja
}  // namespace bough

#include "base/error.h"

template <class... Args>
void bough::jinja::fail(const Args&... args) {
  throw Error{str(args...)};
}
