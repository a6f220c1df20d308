#include "text/chat_template_value.h"

#include <utf8proc.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "text/unicode_text.h"

namespace bough::jinja {
namespace {

constexpr int kDeepestValue = 250;  // levels of nested sequences and dicts; JSON files have at most 200
constexpr int64_t kHeaviest = int64_t{1} << 24;
constexpr size_t kBytesOfAWeight = 8;

// Calls `use` for each code point of `text`, in order.
template <class Use>
void for_each_character(std::string_view text, const Use& use) {
  for (size_t i = 0; i < text.size();) {
    const unicode::Decoded next = unicode::decode(text.substr(i));
    use(next.code_point, text.substr(i, next.length));
    i += next.length;
  }
}

// Python's str.isprintable for one character.
bool is_printable(char32_t c) {
  if (c == ' ') return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS: return false;
    default: return true;
  }
}

void append_hex(std::string& out, uint32_t number, int digits) {
  for (int i = digits - 1; i >= 0; --i) out += "0123456789abcdef"[number >> (4 * i) & 15];
}

std::string text_repr(std::string_view text) {
  const char quote =
      text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos ? '"' : '\'';
  std::string out(1, quote);
  for_each_character(text, [&](char32_t c, std::string_view bytes) {
    if (c == static_cast<unsigned char>(quote) || c == '\\') (out += '\\') += static_cast<char>(c);
    else if (c == '\n') out += "\\n";
    else if (c == '\r') out += "\\r";
    else if (c == '\t') out += "\\t";
    else if (is_printable(c)) out += bytes;
    else if (c < 0x100) append_hex(out += "\\x", c, 2);
    else if (c < 0x10000) append_hex(out += "\\u", c, 4);
    else append_hex(out += "\\U", c, 8);
  });
  return out + quote;
}

std::string text_json(std::string_view text, bool ensure_ascii) {
  std::string out = "\"";
  for_each_character(text, [&](char32_t c, std::string_view bytes) {
    constexpr std::string_view kEscaped = "\"\\\n\r\t\b\f";
    const size_t index = c < 0x80 ? kEscaped.find(static_cast<char>(c)) : std::string_view::npos;
    if (index != std::string_view::npos) (out += '\\') += "\"\\nrtbf"[index];
    else if (c < 0x20 || (ensure_ascii && c >= 0x7F && c < 0x10000 && c != 0x7F))
      append_hex(out += "\\u", c, 4);
    else if (ensure_ascii && c >= 0x10000) {
      append_hex(out += "\\u", 0xD800 + ((c - 0x10000) >> 10), 4);
      append_hex(out += "\\u", 0xDC00 + ((c - 0x10000) & 0x3FF), 4);
    } else {
      out += bytes;
    }
  });
  return out + '"';
}

// Python's repr of a float: the fewest digits that read back as the same number. Uses an exponent below 1e-4
// and from 1e16 on.
std::string float_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
  std::string_view text(buffer, static_cast<size_t>(end - buffer));
  const size_t e = text.find('e');
  const std::string sign = text.starts_with('-') ? "-" : "";
  std::string digits;
  for (const char c : text.substr(0, e))
    if (c >= '0' && c <= '9') digits += c;
  const int exponent = std::atoi(std::string(text.substr(e + 1)).c_str());
  const int size = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    std::string out = sign + digits.substr(0, 1);
    if (size > 1) out += "." + digits.substr(1);
    const std::string shown = std::to_string(std::abs(exponent));
    return out + (exponent < 0 ? "e-" : "e+") + (shown.size() < 2 ? "0" : "") + shown;
  }
  if (exponent < 0) return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  if (size <= exponent + 1)
    return sign + digits + std::string(static_cast<size_t>(exponent + 1 - size), '0') + ".0";
  return sign + digits.substr(0, static_cast<size_t>(exponent + 1)) + "." +
         digits.substr(static_cast<size_t>(exponent + 1));
}

// Computes depth and weight of a container from its elements: one level deeper than the deepest element, and
// heavier by 1 than all elements together.
class Measure {
 public:
  void add(const Value& child) {
    depth_ = std::max(depth_, child.depth());
    weight_ += child.weight();
    if (weight_ > kHeaviest) fail("a value that is too large");
  }
  int depth() const {
    if (depth_ >= kDeepestValue) fail("values nested more than ", kDeepestValue, " levels deep");
    return depth_ + 1;
  }
  int64_t weight() const { return weight_; }

 private:
  int depth_ = 0;
  int64_t weight_ = 1;
};

std::string joined(const std::vector<Value>& items, const char* separator) {
  std::string out;
  for (size_t i = 0; i < items.size(); ++i) out += (i ? separator : "") + to_repr(items[i]);
  return out;
}

class JsonWriter {
 public:
  explicit JsonWriter(const JsonFormat& format) : format_(format) {}

  void write(const Value& value) {
    switch (value.kind()) {
      case Value::Kind::kNone: out_ += "null"; return;
      case Value::Kind::kBool: out_ += value.as_bool() ? "true" : "false"; return;
      case Value::Kind::kInteger: out_ += std::to_string(value.as_integer()); return;
      case Value::Kind::kFloat: out_ += number(value.as_float()); return;
      case Value::Kind::kText: out_ += text_json(value.as_text(), format_.ensure_ascii); return;
      case Value::Kind::kSequence: {
        const Sequence& sequence = value.as_sequence();
        if (sequence.flavour != Sequence::Flavour::kList && sequence.flavour != Sequence::Flavour::kTuple)
          break;
        write_items('[', ']', sequence.items, [&](const Value& item) { write(item); });
        return;
      }
      case Value::Kind::kDict: {
        auto items = value.as_dict().items;
        if (format_.sort_keys)
          std::stable_sort(items.begin(), items.end(),
                           [](const auto& a, const auto& b) { return compare(a.first, b.first) < 0; });
        write_items('{', '}', items, [&](const auto& item) {
          out_ += text_json(key(item.first), format_.ensure_ascii) + format_.key_separator;
          write(item.second);
        });
        return;
      }
      default: break;
    }
    fail("tojson cannot write ", value.is_undefined() ? "something undefined" : value.type_name());
  }

  std::string take() { return std::move(out_); }

 private:
  static std::string number(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
    return float_repr(value);
  }
  static std::string key(const Value& value) {
    switch (value.kind()) {
      case Value::Kind::kText: return value.as_text();
      case Value::Kind::kNone: return "null";
      case Value::Kind::kBool: return value.as_bool() ? "true" : "false";
      case Value::Kind::kInteger: return std::to_string(value.as_integer());
      case Value::Kind::kFloat: return number(value.as_float());
      default: fail("tojson cannot write a key that is ", value.type_name());
    }
  }
  template <class Items, class WriteItem>
  void write_items(char open, char close, const Items& items, const WriteItem& write_item) {
    out_ += open;
    ++level_;
    for (size_t i = 0; i < items.size(); ++i) {
      if (i) out_ += format_.item_separator;
      if (out_.size() > (size_t{1} << 27)) fail("a text that is too long");
      new_line();
      write_item(items[i]);
    }
    --level_;
    if (!items.empty()) new_line();
    out_ += close;
  }
  void new_line() {
    if (!format_.indent) return;
    out_ += '\n';
    for (int i = 0; i < level_; ++i) out_ += *format_.indent;
    if (out_.size() > (size_t{1} << 27)) fail("a text that is too long");
  }

  const JsonFormat& format_;
  int level_ = 0;
  std::string out_;
};

}  // namespace

const Value* Dict::find(const Value& key) const {
  if (key.is_text()) return find(key.as_text());
  for (const auto& [name, value] : items)
    if (equal(name, key)) return &value;
  return nullptr;
}

const Value* Dict::find(std::string_view key) const {
  for (const auto& [name, value] : items)
    if (name.is_text() && name.as_text() == key) return &value;
  return nullptr;
}

Value Value::undefined(std::string what) {
  Value value;
  value.data_ = std::make_shared<Text>(Text{std::move(what)});
  return value;
}
Value Value::boolean(bool value) {
  Value result(Kind::kBool);
  result.whole_ = value;
  return result;
}
Value Value::integer(int64_t value) {
  Value result(Kind::kInteger);
  result.whole_ = value;
  return result;
}
Value Value::number(double value) {
  Value result(Kind::kFloat);
  result.number_ = value;
  return result;
}
Value Value::text(std::string value, bool markup) {
  Value result(Kind::kText);
  result.data_ = std::make_shared<Text>(Text{std::move(value), markup});
  return result;
}
Value Value::sequence(Sequence::Flavour flavour, std::vector<Value> items) {
  Measure measure;
  for (const Value& item : items) measure.add(item);
  Value result(Kind::kSequence);
  result.data_ =
      std::make_shared<Sequence>(Sequence{flavour, std::move(items), measure.depth(), measure.weight()});
  return result;
}
Value Value::dict(std::vector<std::pair<Value, Value>> items) {
  Measure measure;
  for (const auto& [key, value] : items) measure.add(key), measure.add(value);
  Value result(Kind::kDict);
  result.data_ = std::make_shared<Dict>(Dict{std::move(items), measure.depth(), measure.weight()});
  return result;
}
Value Value::method(Value self, std::string name) {
  Value result(Kind::kMethod);
  result.data_ = std::make_shared<Method>(Method{std::move(self), std::move(name)});
  return result;
}
Value Value::function(std::string name) {
  Value result(Kind::kFunction);
  result.data_ = std::make_shared<Text>(Text{std::move(name)});
  return result;
}
Value Value::object(Object* object) {
  Value result(Kind::kObject);
  result.object_ = object;
  return result;
}

Value Value::from_json(const OrderedJson& json, int depth) {
  if (depth > kDeepestValue) fail("values nested more than ", kDeepestValue, " levels deep");
  switch (json.type()) {
    case OrderedJson::value_t::boolean: return boolean(json.get<bool>());
    case OrderedJson::value_t::number_integer: return integer(json.get<int64_t>());
    case OrderedJson::value_t::number_unsigned:
      if (json.get<uint64_t>() > INT64_MAX) fail("a whole number beyond 64 bits: ", json.get<uint64_t>());
      return integer(json.get<int64_t>());
    case OrderedJson::value_t::number_float: return number(json.get<double>());
    case OrderedJson::value_t::string: return text(json.get_ref<const std::string&>());
    case OrderedJson::value_t::array: {
      std::vector<Value> items;
      for (const OrderedJson& item : json) items.push_back(from_json(item, depth + 1));
      return list(std::move(items));
    }
    case OrderedJson::value_t::object: {
      std::vector<std::pair<Value, Value>> items;
      for (const auto& [key, item] : json.items()) items.emplace_back(text(key), from_json(item, depth + 1));
      return dict(std::move(items));
    }
    default: return none();
  }
}

const Method& Value::as_method() const {
  return *static_cast<const Method*>(data_.get());
}

int Value::depth() const {
  if (is_sequence()) return as_sequence().depth;
  if (is_dict()) return as_dict().depth;
  return kind_ == Kind::kMethod ? as_method().self.depth() : 0;
}

int64_t Value::weight() const {
  if (is_text()) return 1 + static_cast<int64_t>(as_text().size() / kBytesOfAWeight);
  if (is_sequence()) return as_sequence().weight;
  if (is_dict()) return as_dict().weight;
  return kind_ == Kind::kMethod ? as_method().self.weight() : 1;
}

std::string_view Value::type_name() const {
  switch (kind_) {
    case Kind::kUndefined: return "something undefined";
    case Kind::kNone: return "None";
    case Kind::kBool: return "a bool";
    case Kind::kInteger: return "a whole number";
    case Kind::kFloat: return "a float";
    case Kind::kText: return "a string";
    case Kind::kDict: return "a dict";
    case Kind::kMethod: return "a method";
    case Kind::kFunction: return "a function";
    case Kind::kObject: return object_->type();
    case Kind::kSequence: break;
  }
  switch (as_sequence().flavour) {
    case Sequence::Flavour::kList: return "a list";
    case Sequence::Flavour::kTuple: return "a tuple";
    case Sequence::Flavour::kView: return "a view of a dict";
    case Sequence::Flavour::kRange: return "a range";
    case Sequence::Flavour::kGenerator: return "a generator";
  }
  return "";
}

bool is_true(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::kUndefined:
    case Value::Kind::kNone: return false;
    case Value::Kind::kBool:
    case Value::Kind::kInteger: return value.as_integer() != 0;
    case Value::Kind::kFloat: return value.as_float() != 0;
    case Value::Kind::kText: return !value.as_text().empty();
    case Value::Kind::kSequence:
      return value.is(Sequence::Flavour::kGenerator) || !value.as_sequence().items.empty();
    case Value::Kind::kDict: return !value.as_dict().items.empty();
    default: return true;
  }
}

bool equal(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    if (a.is_whole() && b.is_whole()) return a.as_integer() == b.as_integer();
    return a.as_float() == b.as_float();
  }
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Value::Kind::kText: return a.as_text() == b.as_text();
    case Value::Kind::kSequence: {
      const Sequence& x = a.as_sequence();
      const Sequence& y = b.as_sequence();
      if (&x == &y) return true;
      if (x.flavour != y.flavour || x.flavour == Sequence::Flavour::kGenerator) return false;
      if (x.flavour == Sequence::Flavour::kView) fail("a comparison of views of dicts is not supported");
      return std::equal(x.items.begin(), x.items.end(), y.items.begin(), y.items.end(), equal);
    }
    case Value::Kind::kDict: {
      const Dict& x = a.as_dict();
      const Dict& y = b.as_dict();
      if (&x == &y) return true;
      return x.items.size() == y.items.size() &&
             std::all_of(x.items.begin(), x.items.end(), [&](const auto& item) {
               const Value* other = y.find(item.first);
               return other && equal(item.second, *other);
             });
    }
    case Value::Kind::kMethod:
      return a.as_method().name == b.as_method().name && equal(a.as_method().self, b.as_method().self);
    case Value::Kind::kFunction: return a.name() == b.name();
    case Value::Kind::kObject: return a.as_object() == b.as_object();
    default: return true;
  }
}

int compare(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    if (a.is_whole() && b.is_whole())
      return a.as_integer() < b.as_integer() ? -1 : a.as_integer() > b.as_integer();
    if (std::isnan(a.as_float()) || std::isnan(b.as_float())) fail("ordering NaN is not supported");
    return a.as_float() < b.as_float() ? -1 : a.as_float() > b.as_float();
  }
  // UTF-8 bytes sort like code points.
  if (a.is_text() && b.is_text()) return a.as_text().compare(b.as_text());
  if (a.is_sequence() && b.is_sequence() && a.as_sequence().flavour == b.as_sequence().flavour &&
      (a.is(Sequence::Flavour::kList) || a.is(Sequence::Flavour::kTuple))) {
    const std::vector<Value>& x = a.as_sequence().items;
    const std::vector<Value>& y = b.as_sequence().items;
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i)
      if (!equal(x[i], y[i])) return compare(x[i], y[i]);
    return x.size() < y.size() ? -1 : x.size() > y.size();
  }
  fail(a.type_name(), " and ", b.type_name(), " cannot be ordered");
}

bool is_hashable(const Value& value) {
  if (value.is_dict() || value.is(Sequence::Flavour::kList) || value.is(Sequence::Flavour::kView))
    return false;
  if (value.is(Sequence::Flavour::kTuple)) {
    const auto& items = value.as_sequence().items;
    return std::all_of(items.begin(), items.end(), is_hashable);
  }
  return true;
}

std::string to_text(const Value& value) {
  if (value.is_undefined()) return "";
  return value.is_text() ? value.as_text() : to_repr(value);
}

std::string to_repr(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::kUndefined: return "Undefined";
    case Value::Kind::kNone: return "None";
    case Value::Kind::kBool: return value.as_bool() ? "True" : "False";
    case Value::Kind::kInteger: return std::to_string(value.as_integer());
    case Value::Kind::kFloat: return float_repr(value.as_float());
    case Value::Kind::kText:
      return value.is_markup() ? "Markup(" + text_repr(value.as_text()) + ")" : text_repr(value.as_text());
    case Value::Kind::kSequence: {
      const Sequence& sequence = value.as_sequence();
      if (sequence.flavour == Sequence::Flavour::kList) return "[" + joined(sequence.items, ", ") + "]";
      if (sequence.flavour == Sequence::Flavour::kTuple)
        return "(" + joined(sequence.items, ", ") + (sequence.items.size() == 1 ? ",)" : ")");
      break;
    }
    case Value::Kind::kDict: {
      std::string out = "{";
      for (const auto& [key, item] : value.as_dict().items)
        out += (out.size() > 1 ? ", " : "") + to_repr(key) + ": " + to_repr(item);
      return out + "}";
    }
    default: break;
  }
  fail("printing ", value.type_name(), " is not supported");
}

std::string to_json(const Value& value, const JsonFormat& format) {
  JsonWriter writer(format);
  writer.write(value);
  return writer.take();
}

}  // namespace bough::jinja
