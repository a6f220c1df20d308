// The data of a chat template: Python values, as far as Jinja can see them.
//
// A Value is immutable and cheap to copy: copies refer to the same text, sequence or dict. Objects with
// state, such as namespaces, belong to the machine that runs the template. A Value only points to them, so
// there are no ownership cycles. Nesting depth and weight are limited when a sequence or a dict is made, so a
// recursive traversal is safe.
//
// Operations that Python would refuse, or that are not supported, throw jinja::Error. The code that runs the
// template adds the template's name and the line.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"

namespace bough {

namespace jinja {

struct Error {
  std::string what;
};
template <class... Args>
[[noreturn]] void fail(const Args&... args);

class Value;

struct Text {
  std::string text;
  bool markup = false;  // result of `safe` or `escape`: Jinja escapes text that is appended to it
};

struct Sequence {
  // kView: a dict's keys, values or items. kGenerator: can be read once, has no length, is always true.
  enum class Flavour { kList, kTuple, kView, kRange, kGenerator };
  Flavour flavour;
  std::vector<Value> items;
  int depth;
  int64_t weight;
  mutable bool consumed = false;  // a generator that was read
};

struct Dict {
  std::vector<std::pair<Value, Value>> items;
  int depth;
  int64_t weight;
  const Value* find(const Value& key) const;
  const Value* find(std::string_view key) const;
};

// An object with state, owned by the machine: a namespace, a macro, the variable `loop`, ...
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
    kMethod,    // bound method of a text, a sequence or a dict
    kFunction,  // a built-in function of Jinja or transformers, by its name
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
  // Throws Error if `json` is nested too deeply, or contains an integer of more than 64 bits.
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

  // The kind must fit; it is not checked.
  bool as_bool() const { return whole_ != 0; }
  int64_t as_integer() const { return whole_; }
  double as_float() const { return kind_ == Kind::kFloat ? number_ : static_cast<double>(whole_); }
  const std::string& as_text() const { return static_cast<const Text*>(data_.get())->text; }
  bool is_markup() const { return is_text() && static_cast<const Text*>(data_.get())->markup; }
  const Sequence& as_sequence() const { return *static_cast<const Sequence*>(data_.get()); }
  const Dict& as_dict() const { return *static_cast<const Dict*>(data_.get()); }
  const Method& as_method() const;
  Object* as_object() const { return object_; }
  // The name of a function or of an undefined variable.
  std::string name() const { return data_ ? as_text() : std::string(); }

  int depth() const;       // nesting depth; 0 if the value contains no other values
  int64_t weight() const;  // size of a full traversal; a part that occurs twice counts twice
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
// Returns less than 0, 0, or more than 0, as a < b, a == b or a > b. Throws Error if a and b have no order.
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
