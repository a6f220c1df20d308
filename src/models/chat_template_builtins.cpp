// What Python and Jinja have built in: attributes and subscripts, functions, methods, filters and tests, as
// far as templates use them. The rest is refused by name when it is reached.
#include <utf8proc.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <initializer_list>

#include "base/error.h"
#include "models/chat_template_machine.h"
#include "models/unicode_text.h"

namespace bough::jinja {
namespace {

using Names = std::initializer_list<std::string_view>;
using Flavour = Sequence::Flavour;
using Values = std::vector<Value>;

bool is_one_of(std::string_view name, Names names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// What the sandbox hides, since it would change the list or dict, does not exist for a template.
const Names kDictMethods = {"get", "items", "keys", "values", "copy", "fromkeys"};
const Names kListMethods = {"index", "count", "copy"};
const Names kTupleMethods = {"index", "count"};
const Names kRangeAttributes = {"index", "count", "start", "stop", "step"};
const Names kViewAttributes = {"isdisjoint", "mapping"};
const Names kIntegerAttributes = {"as_integer_ratio", "bit_count",  "bit_length", "conjugate",
                                  "denominator",      "from_bytes", "imag",       "is_integer",
                                  "numerator",        "real",       "to_bytes"};
const Names kFloatAttributes = {"as_integer_ratio", "conjugate", "fromhex", "hex", "imag",
                                "is_integer",       "real"};
const Names kTextMethods = {
    "capitalize", "casefold",     "center",       "count",   "encode",     "endswith",    "expandtabs",
    "find",       "format",       "format_map",   "index",   "isalnum",    "isalpha",     "isascii",
    "isdecimal",  "isdigit",      "isidentifier", "islower", "isnumeric",  "isprintable", "isspace",
    "istitle",    "isupper",      "join",         "ljust",   "lower",      "lstrip",      "maketrans",
    "partition",  "removeprefix", "removesuffix", "replace", "rfind",      "rindex",      "rjust",
    "rpartition", "rsplit",       "rstrip",       "split",   "splitlines", "startswith",  "strip",
    "swapcase",   "title",        "translate",    "upper",   "zfill"};

bool is_white(char32_t c) {
  return unicode::is_white_space(c) || (c >= 0x1C && c <= 0x1F);
}

struct Character {
  char32_t code_point;
  std::string_view bytes;
};
std::vector<Character> characters_of(std::string_view text) {
  std::vector<Character> out;
  for (size_t i = 0; i < text.size();) {
    const unicode::Decoded next = unicode::decode(text.substr(i));
    out.push_back({next.code_point, text.substr(i, next.length)});
    i += next.length;
  }
  return out;
}
int64_t num_characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

// Characters that Python maps to several ones, or by what stands around them.
bool has_special_case(char32_t c) {
  return c == 0xDF || c == 0x130 || c == 0x149 || (c >= 0x1C4 && c <= 0x1CC) || c == 0x1F0 ||
         (c >= 0x1F1 && c <= 0x1F3) || c == 0x345 || c == 0x390 || c == 0x3A3 || c == 0x3B0 || c == 0x587 ||
         (c >= 0x10D0 && c <= 0x10FF) || (c >= 0x1E96 && c <= 0x1E9E) || (c >= 0x1F50 && c <= 0x1FFC) ||
         (c >= 0xFB00 && c <= 0xFB17);
}

enum class Case { kLower, kUpper, kTitle, kCapitalized, kSwapped };

bool is_upper(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c)) == UTF8PROC_CATEGORY_LU;
}
bool is_lower(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c)) == UTF8PROC_CATEGORY_LL;
}

// `word_goes_on` says, for kTitle, whether a character continues a word: cased ones for str.title, all but
// separators for the filter `title`.
std::string with_case(std::string_view text, Case wanted,
                      const std::function<bool(char32_t)>& word_goes_on = {}) {
  std::string out;
  bool begins = true;
  for (const auto& [c, bytes] : characters_of(text)) {
    if (has_special_case(c)) fail("upper and lower case of ", bough::quoted(bytes), " is not supported");
    const bool up = wanted == Case::kUpper || (wanted == Case::kSwapped && is_lower(c)) ||
                    ((wanted == Case::kTitle || wanted == Case::kCapitalized) && begins);
    const auto code_point = static_cast<utf8proc_int32_t>(c);
    unicode::append(out,
                    static_cast<char32_t>(up ? utf8proc_toupper(code_point) : utf8proc_tolower(code_point)));
    begins = wanted == Case::kTitle && !word_goes_on(c);
  }
  return out;
}

std::string replaced(const std::string& text, const std::string& old, const std::string& by, int64_t most) {
  std::string out;
  size_t begin = 0;
  if (old.empty()) {  // between all characters
    for (const auto& [c, bytes] : characters_of(text)) {
      if (most-- > 0 || most < -1) out += by;
      out += bytes;
    }
    if (most > 0 || most < 0) out += by;
    return out;
  }
  for (size_t end; most != 0 && (end = text.find(old, begin)) != std::string::npos; --most) {
    out.append(text, begin, end - begin) += by;
    begin = end + old.size();
    if (out.size() > (size_t{1} << 27)) fail("it makes a text that is too long");
  }
  return out.append(text, begin);
}

Values split_white(const std::string& text, int64_t most) {
  Values parts;
  size_t i = 0;
  const std::string_view view = text;
  while (true) {
    i = unicode::skip_white_space(view, i);
    if (i >= view.size()) return parts;
    if (most >= 0 && static_cast<int64_t>(parts.size()) == most) {
      parts.push_back(Value::text(strip(text.substr(i), false, true)));
      return parts;
    }
    size_t end = i;
    while (end < view.size()) {
      const unicode::Decoded next = unicode::decode(view.substr(end));
      if (is_white(next.code_point)) break;
      end += next.length;
    }
    parts.push_back(Value::text(text.substr(i, end - i)));
    i = end;
  }
}

Values split(const std::string& text, const std::string& separator, int64_t most, bool from_right) {
  if (separator.empty()) fail("split by an empty string");
  Values parts;
  if (from_right) {
    size_t end = text.size();
    for (size_t at; most != 0 && end >= separator.size() &&
                    (at = text.rfind(separator, end - separator.size())) != std::string::npos;
         --most) {
      parts.push_back(Value::text(text.substr(at + separator.size(), end - at - separator.size())));
      end = at;
    }
    parts.push_back(Value::text(text.substr(0, end)));
    std::reverse(parts.begin(), parts.end());
    return parts;
  }
  size_t begin = 0;
  for (size_t at; most != 0 && (at = text.find(separator, begin)) != std::string::npos; --most) {
    parts.push_back(Value::text(text.substr(begin, at - begin)));
    begin = at + separator.size();
  }
  parts.push_back(Value::text(text.substr(begin)));
  return parts;
}

Values split_lines(const std::string& text, bool keep_ends) {
  Values lines;
  std::string line;
  const std::vector<Character> all = characters_of(text);
  for (size_t i = 0; i < all.size(); ++i) {
    const char32_t c = all[i].code_point;
    const bool ends = c == '\n' || c == '\r' || c == 0x0B || c == 0x0C || (c >= 0x1C && c <= 0x1E) ||
                      c == 0x85 || c == 0x2028 || c == 0x2029;
    if (!ends) {
      line += all[i].bytes;
      continue;
    }
    if (keep_ends) line += all[i].bytes;
    if (c == '\r' && i + 1 < all.size() && all[i + 1].code_point == '\n') {
      ++i;
      if (keep_ends) line += '\n';
    }
    lines.push_back(Value::text(std::exchange(line, "")));
  }
  if (!line.empty()) lines.push_back(Value::text(line));
  return lines;
}

int64_t integer_of(const Value& value, std::string_view what) {
  if (!value.is_whole()) fail(what, " takes a whole number, got ", value.type_name());
  return value.as_integer();
}
const std::string& text_of(const Value& value, std::string_view what) {
  if (!value.is_text()) fail(what, " takes a string, got ", value.type_name());
  return value.as_text();
}

// Python's int() of a text, nothing where it raises.
std::optional<int64_t> parse_integer(const std::string& given) {
  std::string text = strip(given, true, true);
  text.erase(std::remove(text.begin(), text.end(), '_'), text.end());
  const size_t sign = !text.empty() && (text[0] == '-' || text[0] == '+');
  if (text.size() == sign || text.find_first_not_of("0123456789", sign) != std::string::npos) return {};
  if (text.size() - sign > 18) fail("a whole number beyond 64 bits is not supported");
  return std::strtoll(text.c_str(), nullptr, 10);
}
std::optional<double> parse_float(const std::string& given) {
  const std::string text = strip(given, true, true);
  if (text.empty() || text.find_first_not_of("0123456789+-.eE") != std::string::npos) return {};
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  return end == text.c_str() + text.size() ? std::optional(value) : std::nullopt;
}

// As Jinja's filter has it: a line break at the end leaves an empty last line.
std::string indented(const std::string& text, const std::string& indent, bool first, bool blank) {
  const Values lines = split_lines(text + "\n", false);
  std::string out = first ? indent : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    const std::string& line = lines[i].as_text();
    if (i > 0) out += '\n';
    if (i > 0 && (blank || !line.empty())) out += indent;
    out += line;
  }
  return out;
}

}  // namespace

std::string strip(std::string text, bool left, bool right, const std::string* characters) {
  const auto strips = [&](std::string_view character, char32_t c) {
    return characters ? characters->find(character) != std::string::npos : is_white(c);
  };
  size_t begin = 0;
  size_t end = text.size();
  const std::string_view view = text;
  while (left && begin < end) {
    const unicode::Decoded next = unicode::decode(view.substr(begin));
    if (!strips(view.substr(begin, next.length), next.code_point)) break;
    begin += next.length;
  }
  while (right && end > begin) {
    const size_t last = unicode::character_before(view, end);
    if (!strips(view.substr(last, end - last), unicode::decode(view.substr(last)).code_point)) break;
    end = last;
  }
  return text.substr(begin, end - begin);
}

std::vector<Value> Arguments::bind(const std::string& what, Names names) const {
  Values values(names.size());
  if (positional.size() > names.size())
    fail(what, " takes at most ", names.size(), " arguments, got ", positional.size());
  std::copy(positional.begin(), positional.end(), values.begin());
  for (const auto& [name, value] : named) {
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) fail(what, " with the argument ", bough::quoted(name), " is not supported");
    const auto index = static_cast<size_t>(found - names.begin());
    if (index < positional.size()) fail(what, " got the argument ", bough::quoted(name), " twice");
    values[index] = value;
  }
  return values;
}

// Attributes and subscripts --------------------------------------------------------------------------------

Value Machine::attribute(const Value& base, const std::string& name) {
  if (base.is_undefined())
    fail(bough::quoted(base.name()), " is undefined: it has no attribute ", bough::quoted(name));
  const auto python = [&](Names names) { return is_one_of(name, names); };
  const auto missing = [&] {
    return Value::undefined(str(base.type_name(), " without ", bough::quoted(name)));
  };
  switch (base.kind()) {
    case Value::Kind::kDict: {
      if (python(kDictMethods)) return Value::method(base, name);
      if (python({"clear", "pop", "popitem", "setdefault", "update"})) return missing();
      const Value* value = base.as_dict().find(name);
      return value ? *value : missing();
    }
    case Value::Kind::kText: return python(kTextMethods) ? Value::method(base, name) : missing();
    case Value::Kind::kSequence: {
      const Flavour flavour = base.as_sequence().flavour;
      if (flavour == Flavour::kList && python(kListMethods)) return Value::method(base, name);
      if (flavour == Flavour::kTuple && python(kTupleMethods)) return Value::method(base, name);
      if ((flavour == Flavour::kRange && python(kRangeAttributes)) ||
          (flavour == Flavour::kView && python(kViewAttributes)) ||
          (flavour == Flavour::kGenerator && python({"close", "send", "throw"})))
        fail("the attribute ", bough::quoted(name), " of ", base.type_name(), " is not supported");
      return missing();
    }
    case Value::Kind::kObject: return object_attribute(*base.as_object(), name);
    case Value::Kind::kBool:
    case Value::Kind::kInteger:
      if (python(kIntegerAttributes))
        fail("the attribute ", bough::quoted(name), " of a number is not supported");
      return missing();
    case Value::Kind::kFloat:
      if (python(kFloatAttributes))
        fail("the attribute ", bough::quoted(name), " of a number is not supported");
      return missing();
    default: return missing();
  }
}

Value Machine::object_attribute(Object& object, const std::string& name) {
  const auto missing = [&] { return Value::undefined(str(object.type(), " without ", bough::quoted(name))); };
  if (auto* name_space = dynamic_cast<Namespace*>(&object)) {
    const auto found = name_space->attributes.find(name);
    return found == name_space->attributes.end() ? missing() : found->second;
  }
  if (auto* loop = dynamic_cast<Loop*>(&object)) {
    const auto index = static_cast<int64_t>(loop->index);
    const auto size = static_cast<int64_t>(loop->items.size());
    if (name == "index0") return Value::integer(index);
    if (name == "index") return Value::integer(index + 1);
    if (name == "revindex0") return Value::integer(size - index - 1);
    if (name == "revindex") return Value::integer(size - index);
    if (name == "first") return Value::boolean(index == 0);
    if (name == "last") return Value::boolean(index + 1 == size);
    if (name == "length") return Value::integer(size);
    if (name == "depth0") return Value::integer(loop->level);
    if (name == "depth") return Value::integer(loop->level + 1);
    if (name == "previtem")
      return index > 0 ? loop->items[loop->index - 1] : Value::undefined("loop.previtem");
    if (name == "nextitem")
      return index + 1 < size ? loop->items[loop->index + 1] : Value::undefined("loop.nextitem");
    if (name == "cycle" || name == "changed") return Value::method(Value::object(loop), name);
    return missing();
  }
  if (auto* cycler = dynamic_cast<Cycler*>(&object)) {
    if (name == "current") return cycler->items[cycler->position];
    if (name == "next" || name == "reset") return Value::method(Value::object(cycler), name);
  }
  fail("the attribute ", bough::quoted(name), " of ", object.type(), " is not supported");
}

Value Machine::subscript(const Value& base, const Value& key) {
  if (base.is_undefined()) fail(bough::quoted(base.name()), " is undefined: it has no items");
  if (base.is_dict()) {
    if (is_hashable(key))
      if (const Value* value = base.as_dict().find(key)) return *value;
  } else if (key.is_whole() && (base.is_text() || base.is(Flavour::kList) || base.is(Flavour::kTuple) ||
                                base.is(Flavour::kRange))) {
    if (base.is_text()) step(static_cast<int64_t>(base.as_text().size() / 8));
    const int64_t size = length_of(base);
    const int64_t index = key.as_integer() < 0 ? key.as_integer() + size : key.as_integer();
    if (index < 0 || index >= size)
      return Value::undefined(str("item ", key.as_integer(), " of ", base.type_name()));
    if (!base.is_text()) return base.as_sequence().items[static_cast<size_t>(index)];
    return Value::text(std::string(characters_of(base.as_text())[static_cast<size_t>(index)].bytes),
                       base.is_markup());
  }
  if (key.is_text()) return attribute(base, key.as_text());
  return Value::undefined(str("an item of ", base.type_name()));
}

bool Machine::contains(const Value& container, const Value& item) {
  if (container.is_text()) {
    return container.as_text().find(text_of(item, "`in` of a string")) != std::string::npos;
  }
  if (container.is_dict()) {
    if (!is_hashable(item)) fail("`in` of a dict takes no ", item.type_name());
    return container.as_dict().find(item) != nullptr;
  }
  const Values items = items_of(container);
  const auto found = std::find_if(items.begin(), items.end(), [&](const Value& other) {
    step();
    return equal(other, item);
  });
  return found != items.end();
}

std::vector<Value> Machine::items_of(const Value& value) {
  Values items;
  switch (value.kind()) {
    case Value::Kind::kUndefined: return items;
    case Value::Kind::kText:
      step(static_cast<int64_t>(value.as_text().size()) / 4);
      for (const auto& [c, bytes] : characters_of(value.as_text()))
        items.push_back(Value::text(std::string(bytes)));
      return items;
    case Value::Kind::kDict:
      for (const auto& [key, item] : value.as_dict().items) items.push_back(key);
      break;
    case Value::Kind::kSequence: {
      const Sequence& sequence = value.as_sequence();
      if (sequence.flavour == Flavour::kGenerator) {
        if (sequence.consumed) return items;
        sequence.consumed = true;
      }
      items = sequence.items;
      break;
    }
    case Value::Kind::kObject:
      if (dynamic_cast<Loop*>(value.as_object())) fail("iterating over `loop` is not supported");
      [[fallthrough]];
    default: fail(value.type_name(), " cannot be iterated over");
  }
  step(static_cast<int64_t>(items.size()));
  return items;
}

int64_t Machine::length_of(const Value& value) {
  if (value.is_undefined()) return 0;
  if (value.is_text()) return num_characters(value.as_text());
  if (value.is_dict()) return static_cast<int64_t>(value.as_dict().items.size());
  if (value.is_sequence() && !value.is(Flavour::kGenerator))
    return static_cast<int64_t>(value.as_sequence().items.size());
  fail("the length of ", value.type_name());
}

// Functions and methods ------------------------------------------------------------------------------------

bool Machine::is_function(std::string_view name) {
  return is_one_of(
      name, {"range", "dict", "namespace", "cycler", "joiner", "lipsum", "raise_exception", "strftime_now"});
}

Value Machine::call(const Value& callee, Arguments arguments) {
  step();
  switch (callee.kind()) {
    case Value::Kind::kFunction: return call_function(callee.name(), arguments);
    case Value::Kind::kMethod:
      return call_method(callee.as_method().self, callee.as_method().name, arguments);
    case Value::Kind::kObject:
      if (const auto* macro = dynamic_cast<Macro*>(callee.as_object()))
        return call_macro(*macro, std::move(arguments));
      return call_object(*callee.as_object(), arguments);
    case Value::Kind::kUndefined: fail("the function ", bough::quoted(callee.name()), " is undefined");
    default: fail("a call of ", callee.type_name(), ", which is no function");
  }
}

Value Machine::call_function(const std::string& name, const Arguments& arguments) {
  if (name == "raise_exception") {
    const Values given = arguments.bind(name, {"message"});
    fail("it refuses the conversation: ", to_text(given[0]));
  }
  if (name == "namespace" || name == "dict") {
    std::vector<std::pair<Value, Value>> items;
    if (arguments.positional.size() > 1) fail(name, " takes one dict and named values");
    for (const Value& given : arguments.positional) {
      if (!given.is_dict()) fail(name, " of ", given.type_name(), " is not supported");
      items = given.as_dict().items;
    }
    for (const auto& [key, value] : arguments.named) {
      const auto same = std::find_if(items.begin(), items.end(), [&, &key = key](const auto& item) {
        return item.first.is_text() && item.first.as_text() == key;
      });
      if (same != items.end()) same->second = value;
      else items.emplace_back(Value::text(key), value);
    }
    if (name == "dict") return Value::dict(std::move(items));
    auto& name_space = make<Namespace>();
    for (const auto& [key, value] : items)
      if (key.is_text()) name_space.attributes[key.as_text()] = value;
    return Value::object(&name_space);
  }
  if (name == "range") {
    const Values given = arguments.bind(name, {"start", "stop", "step"});
    const bool one = given[1].is_undefined();
    const int64_t begin = one ? 0 : integer_of(given[0], name);
    const int64_t end = integer_of(given[one ? 0 : 1], name);
    const int64_t by = given[2].is_undefined() ? 1 : integer_of(given[2], name);
    if (by == 0) fail("range with the step 0");
    Values items;
    for (int64_t i = begin; by > 0 ? i < end : i > end;) {
      items.push_back(Value::integer(i));
      if (items.size() > 100'000) fail("a range of more than 100000");
      if (__builtin_add_overflow(i, by, &i)) break;
    }
    step(static_cast<int64_t>(items.size()));
    return Value::sequence(Flavour::kRange, std::move(items));
  }
  if (name == "strftime_now") {
    const Values given = arguments.bind(name, {"format"});
    const std::string& format = text_of(given[0], name);
    if (format.empty()) return Value::text("");
    if (format.find("%f") != std::string::npos || format.size() > 200)
      fail("this format of strftime_now is not supported");
    std::tm time{};
    localtime_r(&now_, &time);
    char buffer[2000];
    return Value::text(std::string(buffer, std::strftime(buffer, sizeof buffer, format.c_str(), &time)));
  }
  if (name == "joiner") {
    const Values given = arguments.bind(name, {"sep"});
    auto& joiner = make<Joiner>();
    joiner.separator = given[0].is_undefined() ? ", " : text_of(given[0], name);
    return Value::object(&joiner);
  }
  if (name == "cycler" && arguments.named.empty() && !arguments.positional.empty()) {
    auto& cycler = make<Cycler>();
    cycler.items = arguments.positional;
    return Value::object(&cycler);
  }
  fail("the function ", bough::quoted(name), " is not supported");
}

Value Machine::call_object(Object& object, const Arguments& arguments) {
  if (auto* joiner = dynamic_cast<Joiner*>(&object)) {
    arguments.bind("a joiner", {});
    return Value::text(std::exchange(joiner->used, true) ? joiner->separator : "");
  }
  if (auto* loop = dynamic_cast<Loop*>(&object); loop && loop->statement) {
    const Values given = arguments.bind("loop", {"iterable"});
    std::string outer = std::exchange(out_, "");
    execute_for(*loop->statement, given[0], *loop->frame, loop->level + 1);
    return text(std::exchange(out_, std::move(outer)));
  }
  fail("a call of ", object.type(), " is not supported");
}

Value Machine::call_method(const Value& self, const std::string& name, const Arguments& arguments) {
  if (self.is_text()) return text_method(self, name, arguments);
  if (self.is(Value::Kind::kObject)) {
    if (auto* loop = dynamic_cast<Loop*>(self.as_object())) {
      const Values& given = arguments.positional;
      if (name == "cycle") {
        if (given.empty() || !arguments.named.empty()) fail("loop.cycle takes values");
        return given[loop->index % given.size()];
      }
      const bool changed =
          !loop->has_changed || !std::equal(given.begin(), given.end(), loop->last_changed.begin(),
                                            loop->last_changed.end(), equal);
      loop->has_changed = true;
      loop->last_changed = given;
      return Value::boolean(changed);
    }
    if (auto* cycler = dynamic_cast<Cycler*>(self.as_object())) {
      if (name == "reset") return cycler->position = 0, Value::none();
      const Value current = cycler->items[cycler->position];
      cycler->position = (cycler->position + 1) % cycler->items.size();
      return current;
    }
  }
  if (self.is_dict()) {
    const auto& items = self.as_dict().items;
    if (name == "get") {
      const Values given = arguments.bind("get", {"key", "default"});
      if (!is_hashable(given[0])) fail("get of a key that is ", given[0].type_name());
      const Value* value = self.as_dict().find(given[0]);
      return value ? *value : arguments.positional.size() > 1 ? given[1] : Value::none();
    }
    if (is_one_of(name, {"items", "keys", "values"})) {
      arguments.bind(name, {});
      Values out;
      for (const auto& [key, value] : items)
        out.push_back(name == "keys"     ? key
                      : name == "values" ? value
                                         : Value::sequence(Flavour::kTuple, {key, value}));
      step(static_cast<int64_t>(out.size()));
      return Value::sequence(Flavour::kView, std::move(out));
    }
    if (name == "copy") return self;
  }
  if (self.is_sequence()) {
    const Values& all = self.as_sequence().items;
    if (name == "copy") return self;
    const Values given = arguments.bind(name, {"value"});
    if (name == "count")
      return Value::integer(
          std::count_if(all.begin(), all.end(), [&](const Value& item) { return equal(item, given[0]); }));
    for (size_t i = 0; i < all.size(); ++i)
      if (equal(all[i], given[0])) return Value::integer(static_cast<int64_t>(i));
    fail("index of a value that is not in the list");
  }
  fail("the method ", bough::quoted(name), " of ", self.type_name(), " is not supported");
}

Value Machine::text_method(const Value& self, const std::string& name, const Arguments& arguments) {
  const std::string& s = self.as_text();
  if (self.is_markup() && !is_one_of(name, {"strip", "lstrip", "rstrip", "startswith", "endswith"}))
    fail("the method ", bough::quoted(name), " of a string that `safe` or `escape` made is not supported");
  step(1 + static_cast<int64_t>(s.size()) / 32);
  const auto bind = [&](Names names) { return arguments.bind(str("the method ", name), names); };
  const auto made = [&](std::string out) { return text(std::move(out), self.is_markup()); };
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    const Values given = bind({"chars"});
    const bool all = given[0].is_undefined() || given[0].is_none();
    return made(strip(s, name != "rstrip", name != "lstrip", all ? nullptr : &text_of(given[0], name)));
  }
  if (name == "startswith" || name == "endswith") {
    const Values given = bind({"affix"});
    const auto has = [&](const Value& affix) {
      const std::string& wanted = text_of(affix, name);
      return name == "startswith" ? s.starts_with(wanted) : s.ends_with(wanted);
    };
    if (!given[0].is(Flavour::kTuple)) return Value::boolean(has(given[0]));
    const Values& affixes = given[0].as_sequence().items;
    return Value::boolean(std::any_of(affixes.begin(), affixes.end(), has));
  }
  if (name == "split" || name == "rsplit") {
    const Values given = bind({"sep", "maxsplit"});
    const int64_t most = given[1].is_undefined() ? -1 : integer_of(given[1], name);
    Values parts;
    if (!given[0].is_undefined() && !given[0].is_none()) {
      parts = bough::jinja::split(s, text_of(given[0], name), most, name == "rsplit");
    } else if (name == "split" || most < 0) {
      parts = split_white(s, most);
    } else {
      fail("rsplit by white space is not supported");
    }
    step(static_cast<int64_t>(parts.size()));
    return Value::list(std::move(parts));
  }
  if (name == "splitlines") {
    const Values given = bind({"keepends"});
    return Value::list(split_lines(s, is_true(given[0])));
  }
  if (name == "upper") return bind({}), made(with_case(s, Case::kUpper));
  if (name == "lower") return bind({}), made(with_case(s, Case::kLower));
  if (name == "capitalize") return bind({}), made(with_case(s, Case::kCapitalized));
  if (name == "swapcase") return bind({}), made(with_case(s, Case::kSwapped));
  if (name == "title")
    return bind({}), made(with_case(s, Case::kTitle, [](char32_t c) { return is_upper(c) || is_lower(c); }));
  if (name == "replace") {
    const Values given = bind({"old", "new", "count"});
    const int64_t most = given[2].is_undefined() ? -1 : integer_of(given[2], name);
    const std::string& old = text_of(given[0], name);
    const std::string& by = text_of(given[1], name);
    if (most >= 0 && old.empty()) fail("replace of an empty string with a count is not supported");
    return made(replaced(s, old, by, most));
  }
  if (is_one_of(name, {"find", "rfind", "index", "rindex", "count"})) {
    const Values given = bind({"sub"});
    const std::string& wanted = text_of(given[0], name);
    if (name == "count") {
      if (wanted.empty()) return Value::integer(num_characters(s) + 1);
      int64_t count = 0;
      for (size_t at = 0; (at = s.find(wanted, at)) != std::string::npos; at += wanted.size()) ++count;
      return Value::integer(count);
    }
    const size_t at = name[0] == 'r' ? s.rfind(wanted) : s.find(wanted);
    if (at == std::string::npos && name.ends_with("index")) fail("index of a string that is not found");
    return Value::integer(at == std::string::npos ? -1 : num_characters(std::string_view(s).substr(0, at)));
  }
  if (name == "join") {
    const Values given = bind({"iterable"});
    std::string out;
    bool first = true;
    if (given[0].is_undefined()) fail("join of something undefined");
    for (const Value& item : items_of(given[0])) {
      if (!std::exchange(first, false)) out += s;
      out += text_of(item, name);
      if (out.size() > (size_t{1} << 27)) fail("it makes a text that is too long");
    }
    return made(std::move(out));
  }
  if (name == "removeprefix" || name == "removesuffix") {
    const Values given = bind({"affix"});
    const std::string& affix = text_of(given[0], name);
    if (name == "removeprefix") return made(s.starts_with(affix) ? s.substr(affix.size()) : s);
    return made(s.ends_with(affix) ? s.substr(0, s.size() - affix.size()) : s);
  }
  if (name == "partition" || name == "rpartition") {
    const Values given = bind({"sep"});
    const std::string& separator = text_of(given[0], name);
    if (separator.empty()) fail("partition by an empty string");
    const size_t at = name == "partition" ? s.find(separator) : s.rfind(separator);
    if (at == std::string::npos) {
      const Value empty = Value::text("");
      return Value::sequence(Flavour::kTuple,
                             name == "partition" ? Values{self, empty, empty} : Values{empty, empty, self});
    }
    return Value::sequence(Flavour::kTuple, {Value::text(s.substr(0, at)), given[0],
                                             Value::text(s.substr(at + separator.size()))});
  }
  if (is_one_of(name, {"ljust", "rjust", "center", "zfill"})) {
    const Values given = bind({"width", "fillchar"});
    const int64_t width = integer_of(given[0], name);
    if (width > (1 << 20)) fail("it makes a text that is too long");
    if (name == "zfill" && (s.starts_with('-') || s.starts_with('+')))
      fail("zfill of a signed number is not supported");
    const std::string fill = name == "zfill" ? "0" : given[1].is_undefined() ? " " : text_of(given[1], name);
    const int64_t missing = std::max<int64_t>(0, width - num_characters(s));
    // Python's center puts the odd blank to the left where the width is odd.
    int64_t left = name == "ljust" ? 0 : missing;
    if (name == "center") left = missing / 2 + (missing & width & 1);
    std::string out;
    for (int64_t i = 0; i < left; ++i) out += fill;
    out += s;
    for (int64_t i = left; i < missing; ++i) out += fill;
    return made(std::move(out));
  }
  if (is_one_of(name, {"isdigit", "isdecimal", "isnumeric", "isalpha", "isalnum", "isspace", "islower",
                       "isupper", "isascii"})) {
    bind({});
    bool all = !s.empty() || name == "isascii", cased = false;
    for (const auto& [c, bytes] : characters_of(s)) {
      const utf8proc_category_t category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
      const bool letter = category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
      const bool digit = c >= '0' && c <= '9';
      if (c >= 0x80 && !letter &&
          (name == "isdigit" || name == "isdecimal" || name == "isnumeric" || name == "isalnum"))
        fail(name, " of ", bough::quoted(bytes), " is not supported");
      cased |= is_upper(c) || is_lower(c);
      all &= name == "isalpha"   ? letter
             : name == "isalnum" ? letter || digit
             : name == "isspace" ? is_white(c)
             : name == "isascii" ? c < 0x80
             : name == "islower" ? !is_upper(c)
             : name == "isupper" ? !is_lower(c)
                                 : digit;
    }
    return Value::boolean(all && (cased || (name != "islower" && name != "isupper")));
  }
  if (name == "format") {
    std::string out;
    size_t automatic = 0;
    for (size_t i = 0; i < s.size(); ++i) {
      if (s[i] != '{' && s[i] != '}') {
        out += s[i];
        continue;
      }
      if (i + 1 < s.size() && s[i + 1] == s[i]) {
        out += s[i++];
        continue;
      }
      const size_t end = s.find('}', i);
      if (s[i] == '}' || end == std::string::npos) fail("a wrong format string");
      const std::string field = s.substr(i + 1, end - i - 1);
      i = end;
      if (field.find_first_of(".[!:{") != std::string::npos)
        fail("the format ", bough::quoted(field), " is not supported");
      const auto named = std::find_if(arguments.named.begin(), arguments.named.end(),
                                      [&](const auto& a) { return a.first == field; });
      const std::optional<int64_t> number =
          field.empty() ? static_cast<int64_t>(automatic++) : parse_integer(field);
      if (named != arguments.named.end()) out += to_text(named->second);
      else if (number && *number >= 0 && *number < static_cast<int64_t>(arguments.positional.size()))
        out += to_text(arguments.positional[static_cast<size_t>(*number)]);
      else fail("a format string without its argument");
      if (out.size() > (size_t{1} << 27)) fail("it makes a text that is too long");
    }
    return made(std::move(out));
  }
  fail("the method ", bough::quoted(name), " of a string is not supported");
}

Value Machine::format_percent(const Value& format, const Value& given) {
  const std::string& s = format.as_text();
  const Values arguments = given.is(Flavour::kTuple) ? given.as_sequence().items : Values{given};
  size_t used = 0;
  std::string out;
  for (size_t i = 0; i < s.size(); ++i) {
    if (s[i] != '%') {
      out += s[i];
      continue;
    }
    const char kind = ++i < s.size() ? s[i] : ' ';
    if (kind == '%') {
      out += '%';
      continue;
    }
    if (kind != 's' && kind != 'd' && kind != 'i' && kind != 'r')
      fail("the format ", bough::quoted(std::string("%") + kind), " is not supported");
    if (used >= arguments.size()) fail("a format string without its argument");
    const Value& argument = arguments[used++];
    if (kind == 'd' || kind == 'i') out += std::to_string(integer_of(argument, "the format %d"));
    else out += kind == 'r' ? to_repr(argument) : to_text(argument);
    if (out.size() > (size_t{1} << 27)) fail("it makes a text that is too long");
  }
  if (used < arguments.size() && !(given.is_dict() || given.is(Flavour::kList)))
    fail("a format string with more arguments than it has is not supported");
  return text(std::move(out), format.is_markup());
}

// Filters --------------------------------------------------------------------------------------------------

Value Machine::filter(const std::string& name, const Value& value, const Arguments& arguments) {
  step(1 + value.weight() / 16);
  bool found = true;
  Value result = text_filter(name, value, arguments, found);
  if (found) return result;
  found = true;
  result = sequence_filter(name, value, arguments, found);
  if (found) return result;
  const auto bind = [&](Names names) { return arguments.bind(str("the filter ", name), names); };
  if (name == "default" || name == "d") {
    const Values given = bind({"default_value", "boolean"});
    const Value otherwise = given[0].is_undefined() && arguments.positional.empty() && arguments.named.empty()
                                ? Value::text("")
                                : given[0];
    return value.is_undefined() || (is_true(given[1]) && !is_true(value)) ? otherwise : value;
  }
  if (name == "tojson") {
    const Values given = bind({"ensure_ascii", "indent", "separators", "sort_keys"});
    JsonFormat format;
    format.ensure_ascii = is_true(given[0]);
    if (given[1].is_text()) format.indent = given[1].as_text();
    else if (!given[1].is_undefined() && !given[1].is_none())
      format.indent =
          std::string(static_cast<size_t>(std::clamp<int64_t>(integer_of(given[1], "indent"), 0, 100)), ' ');
    if (format.indent) format.item_separator = ",";
    if (!given[2].is_undefined() && !given[2].is_none()) {
      const Values separators = items_of(given[2]);
      if (separators.size() != 2) fail("tojson takes two separators");
      format.item_separator = text_of(separators[0], "separators");
      format.key_separator = text_of(separators[1], "separators");
    }
    format.sort_keys = is_true(given[3]);
    return text(to_json(value, format));
  }
  if (value.is_undefined() && is_one_of(name, {"int", "float", "round", "abs"}))
    fail(bough::quoted(value.name()), " is undefined: it is no number");
  if (name == "abs") {
    bind({});
    if (!value.is_number()) fail("abs of ", value.type_name());
    return value.as_float() < 0 ? unary("-", value)
           : value.is_whole()   ? Value::integer(value.as_integer())
                                : value;
  }
  if (name == "int") {
    const Values given = bind({"default"});
    const Value otherwise = given[0].is_undefined() ? Value::integer(0) : given[0];
    std::optional<double> number;
    if (value.is_whole()) return Value::integer(value.as_integer());
    if (value.is_text()) {
      if (const auto whole = parse_integer(value.as_text())) return Value::integer(*whole);
      number = parse_float(value.as_text());
    } else if (value.is_number()) {
      number = value.as_float();
    }
    if (!number || !std::isfinite(*number)) return otherwise;
    if (std::abs(*number) > 9e18) fail("a whole number beyond 64 bits is not supported");
    return Value::integer(static_cast<int64_t>(*number));
  }
  if (name == "float") {
    const Values given = bind({"default"});
    if (value.is_number()) return Value::number(value.as_float());
    const std::optional<double> number = value.is_text() ? parse_float(value.as_text()) : std::nullopt;
    return number ? Value::number(*number) : given[0].is_undefined() ? Value::number(0) : given[0];
  }
  if (name == "round") {
    const Values given = bind({"precision", "method"});
    const int64_t precision = given[0].is_undefined() ? 0 : integer_of(given[0], name);
    if (!value.is_number()) fail("round of ", value.type_name());
    const std::string method = given[1].is_undefined() ? "common" : text_of(given[1], name);
    if (method == "common" && value.is_whole() && precision >= 0) return Value::integer(value.as_integer());
    if (precision < 0 || precision > 15) fail("round with this precision is not supported");
    if (method == "common") {
      char buffer[400];
      std::snprintf(buffer, sizeof buffer, "%.*f", static_cast<int>(precision), value.as_float());
      return Value::number(std::strtod(buffer, nullptr));
    }
    if (method != "ceil" && method != "floor") fail("round with the method ", bough::quoted(method));
    const double scale = std::pow(10, precision);
    const double scaled = value.as_float() * scale;
    return Value::number((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale);
  }
  if (name == "attr") {
    const Values given = bind({"name"});
    if (value.is_dict() && !is_one_of(text_of(given[0], name), kDictMethods))
      return Value::undefined(given[0].as_text());
    return attribute(value, text_of(given[0], name));
  }
  fail("the filter ", bough::quoted(name), " is not supported");
}

Value Machine::text_filter(const std::string& name, const Value& value, const Arguments& arguments,
                           bool& found) {
  const auto bind = [&](Names names) { return arguments.bind(str("the filter ", name), names); };
  const auto made = [&](std::string out) { return text(std::move(out), value.is_markup()); };
  if (name == "trim") {
    const Values given = bind({"chars"});
    const bool all = given[0].is_undefined() || given[0].is_none();
    return made(strip(to_text(value), true, true, all ? nullptr : &text_of(given[0], name)));
  }
  if (name == "string") return bind({}), value.is_text() ? value : text(to_text(value));
  if (name == "safe") return bind({}), text(to_text(value), true);
  if (name == "escape" || name == "e" || name == "forceescape") {
    bind({});
    if (value.is_markup() && name != "forceescape") return value;
    std::string out;
    for (const char c : to_text(value)) {
      if (c == '&') out += "&amp;";
      else if (c == '<') out += "&lt;";
      else if (c == '>') out += "&gt;";
      else if (c == '\'') out += "&#39;";
      else if (c == '"') out += "&#34;";
      else out += c;
    }
    return text(std::move(out), true);
  }
  if (name == "upper") return bind({}), made(with_case(to_text(value), Case::kUpper));
  if (name == "lower") return bind({}), made(with_case(to_text(value), Case::kLower));
  if (name == "capitalize") return bind({}), made(with_case(to_text(value), Case::kCapitalized));
  if (name == "title")
    return bind({}), made(with_case(to_text(value), Case::kTitle, [](char32_t c) {
             return !(c == '-' || c == '(' || c == '{' || c == '[' || c == '<' || is_white(c));
           }));
  if (name == "replace" || name == "indent" || name == "format" || name == "center" || name == "truncate") {
    if (value.is_markup())
      fail("the filter ", name, " of a string that `safe` or `escape` made is not supported");
  }
  if (name == "replace") {
    const Values given = bind({"old", "new", "count"});
    const std::string old = to_text(given[0]);
    const int64_t most = given[2].is_undefined() || given[2].is_none() ? -1 : integer_of(given[2], name);
    if (most >= 0 && old.empty()) fail("replace of an empty string with a count is not supported");
    return made(replaced(to_text(value), old, to_text(given[1]), most));
  }
  if (name == "indent") {
    const Values given = bind({"width", "first", "blank"});
    std::string indent(4, ' ');
    if (given[0].is_text()) indent = given[0].as_text();
    else if (!given[0].is_undefined())
      indent =
          std::string(static_cast<size_t>(std::clamp<int64_t>(integer_of(given[0], name), 0, 1000)), ' ');
    if (!value.is_text()) fail("indent of ", value.type_name());
    return made(indented(value.as_text(), indent, is_true(given[1]), is_true(given[2])));
  }
  if (name == "format") {
    if (!arguments.named.empty()) fail("the filter format with named arguments is not supported");
    return format_percent(Value::text(to_text(value)),
                          Value::sequence(Flavour::kTuple, arguments.positional));
  }
  if (name == "center")
    return text_method(Value::text(to_text(value)), "center",
                       arguments.positional.empty() ? Arguments{{Value::integer(80)}, {}} : arguments);
  if (name == "truncate") {
    const Values given = bind({"length", "killwords", "end", "leeway"});
    const int64_t length = given[0].is_undefined() ? 255 : integer_of(given[0], name);
    const std::string end = given[2].is_undefined() ? "..." : text_of(given[2], name);
    const int64_t leeway = given[3].is_undefined() || given[3].is_none() ? 5 : integer_of(given[3], name);
    const std::string& s = text_of(value, name);
    if (num_characters(s) <= length + leeway) return value;
    const int64_t kept = length - num_characters(end);
    if (kept < 0) fail("truncate to fewer characters than its end has");
    const std::vector<Character> all = characters_of(s);
    std::string out;
    for (int64_t i = 0; i < kept; ++i) out += all[static_cast<size_t>(i)].bytes;
    if (!is_true(given[1]))
      if (const size_t blank = out.rfind(' '); blank != std::string::npos) out.resize(blank);
    return made(out + end);
  }
  if (name == "wordcount") {
    bind({});
    int64_t count = 0;
    bool inside = false;
    for (const auto& [c, bytes] : characters_of(to_text(value))) {
      const utf8proc_category_t category = utf8proc_category(static_cast<utf8proc_int32_t>(c));
      const bool word = c == '_' || (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO) ||
                        (category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO);
      count += word && !inside;
      inside = word;
    }
    return Value::integer(count);
  }
  found = false;
  return {};
}

// `a.b.0` as filters take it: items first, then attributes.
Value Machine::attribute_path(const Value& value, const Value& path) {
  if (path.is_whole()) return subscript(value, path);
  Value result = value;
  for (const Value& part : bough::jinja::split(text_of(path, "an attribute"), ".", -1, false)) {
    const std::optional<int64_t> number = part.as_text().find_first_not_of("0123456789") == std::string::npos
                                              ? parse_integer(part.as_text())
                                              : std::nullopt;
    result = subscript(result, number ? Value::integer(*number) : part);
  }
  return result;
}

Value Machine::sort_key(const Value& value, const Value& path, bool case_sensitive) {
  const Value key = path.is_undefined() || path.is_none() ? value : attribute_path(value, path);
  return !case_sensitive && key.is_text() ? Value::text(with_case(key.as_text(), Case::kLower)) : key;
}

Value Machine::sorted(const Value& value, const Arguments& arguments) {
  const Values given = arguments.bind("the filter sort", {"reverse", "case_sensitive", "attribute"});
  if (given[2].is_text() && given[2].as_text().find(',') != std::string::npos)
    fail("sort by several attributes is not supported");
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& item : items_of(value))
    keyed.emplace_back(sort_key(item, given[2], is_true(given[1])), item);
  const bool reverse = is_true(given[0]);
  // A sort that throws in the middle loses nothing: the values are copies.
  std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
    step();
    return reverse ? compare(b.first, a.first) < 0 : compare(a.first, b.first) < 0;
  });
  Values out;
  for (auto& [key, item] : keyed) out.push_back(std::move(item));
  return Value::list(std::move(out));
}

// select, reject, selectattr, rejectattr.
Value Machine::selected(const std::string& name, const Value& value, const Arguments& arguments) {
  const bool by_attribute = name.ends_with("attr");
  const bool wanted = name.starts_with("select");
  Arguments rest = arguments;
  Value path;
  if (by_attribute) {
    if (rest.positional.empty()) fail("the filter ", name, " takes an attribute");
    path = rest.positional[0];
    rest.positional.erase(rest.positional.begin());
  }
  std::string test_name;
  if (!rest.positional.empty()) {
    test_name = text_of(rest.positional[0], name);
    rest.positional.erase(rest.positional.begin());
  }
  Values out;
  for (const Value& item : is_true(value) ? items_of(value) : Values()) {  // None has no items here
    const Value tested = by_attribute ? attribute_path(item, path) : item;
    const bool passes = test_name.empty() ? is_true(tested) : test(test_name, tested, rest);
    if (passes == wanted) out.push_back(item);
  }
  return Value::sequence(Flavour::kGenerator, std::move(out));
}

Value Machine::mapped(const Value& value, const Arguments& arguments) {
  const Values all = is_true(value) ? items_of(value) : Values();  // None has no items here
  Values out;
  if (arguments.positional.empty()) {
    Value path, otherwise;
    for (const auto& [name, given] : arguments.named) {
      if (name == "attribute") path = given;
      else if (name == "default") otherwise = given;
      else fail("the filter map with the argument ", bough::quoted(name), " is not supported");
    }
    for (const Value& item : all) {
      const Value found = attribute_path(item, path);
      out.push_back(found.is_undefined() && !otherwise.is_undefined() ? otherwise : found);
    }
  } else {
    Arguments rest = arguments;
    const std::string name = text_of(rest.positional[0], "map");
    rest.positional.erase(rest.positional.begin());
    for (const Value& item : all) out.push_back(filter(name, item, rest));
  }
  return Value::sequence(Flavour::kGenerator, std::move(out));
}

Value Machine::sequence_filter(const std::string& name, const Value& value, const Arguments& arguments,
                               bool& found) {
  const auto bind = [&](Names names) { return arguments.bind(str("the filter ", name), names); };
  if (name == "length" || name == "count") return bind({}), Value::integer(length_of(value));
  if (is_one_of(name, {"select", "reject", "selectattr", "rejectattr"}))
    return selected(name, value, arguments);
  if (name == "map") return mapped(value, arguments);
  if (name == "sort") return sorted(value, arguments);
  if (name == "list") return bind({}), Value::list(items_of(value));
  if (name == "first" || name == "last") {
    bind({});
    if (name == "last" && value.is(Flavour::kGenerator)) fail("the last item of a generator");
    if (value.is(Flavour::kGenerator)) fail("the first item of a generator is not supported: use list");
    const Values items = items_of(value);
    if (items.empty()) return Value::undefined(str("the ", name, " item of an empty sequence"));
    return name == "first" ? items.front() : items.back();
  }
  if (name == "reverse") {
    bind({});
    if (value.is(Flavour::kGenerator)) fail("reverse of a generator is not supported: use list");
    Values items = items_of(value);
    std::reverse(items.begin(), items.end());
    if (!value.is_text()) return Value::sequence(Flavour::kGenerator, std::move(items));
    std::string out;
    for (const Value& item : items) out += item.as_text();
    return text(std::move(out), value.is_markup());
  }
  if (name == "join") {
    const Values given = bind({"d", "attribute"});
    const std::string separator = to_text(given[0]);
    std::string out;
    bool first = true;
    for (const Value& item : items_of(value)) {
      if (!std::exchange(first, false)) out += separator;
      out += to_text(given[1].is_undefined() || given[1].is_none() ? item : attribute_path(item, given[1]));
      if (out.size() > (size_t{1} << 27)) fail("it makes a text that is too long");
    }
    return text(std::move(out));
  }
  if (name == "items" || name == "dictsort") {
    Values out;
    if (name == "items" && value.is_undefined()) return Value::sequence(Flavour::kGenerator, {});
    if (!value.is_dict()) fail("the filter ", name, " of ", value.type_name());
    for (const auto& [key, item] : value.as_dict().items)
      out.push_back(Value::sequence(Flavour::kTuple, {key, item}));
    if (name == "items") return bind({}), Value::sequence(Flavour::kGenerator, std::move(out));
    const Values given = bind({"case_sensitive", "by", "reverse"});
    const std::string by = given[1].is_undefined() ? "key" : text_of(given[1], name);
    if (by != "key" && by != "value") fail("dictsort by ", bough::quoted(by));
    Arguments how;
    how.named = {{"case_sensitive", given[0]},
                 {"attribute", Value::integer(by == "key" ? 0 : 1)},
                 {"reverse", given[2]}};
    return sorted(Value::list(std::move(out)), how);
  }
  if (name == "min" || name == "max" || name == "unique") {
    const Values given = bind({"case_sensitive", "attribute"});
    Values keys, out;
    for (const Value& item : items_of(value)) {
      const Value key = sort_key(item, given[1], is_true(given[0]));
      if (name == "unique") {
        step(static_cast<int64_t>(keys.size()));
        if (!is_hashable(key)) fail("unique of ", key.type_name());
        if (std::any_of(keys.begin(), keys.end(), [&](const Value& other) { return equal(other, key); }))
          continue;
      } else if (!keys.empty()) {
        const int order = compare(key, keys[0]);
        if (name == "min" ? order >= 0 : order <= 0) continue;
        keys.clear(), out.clear();
      }
      keys.push_back(key), out.push_back(item);
    }
    if (name == "unique") return Value::sequence(Flavour::kGenerator, std::move(out));
    return out.empty() ? Value::undefined(str("the ", name, " of an empty sequence")) : out[0];
  }
  if (name == "sum") {
    const Values given = bind({"attribute", "start"});
    Value total = given[1].is_undefined() ? Value::integer(0) : given[1];
    for (const Value& item : items_of(value))
      total = binary("+", total,
                     given[0].is_undefined() || given[0].is_none() ? item : attribute_path(item, given[0]));
    return total;
  }
  if (name == "batch") {
    const Values given = bind({"linecount", "fill_with"});
    const int64_t size = integer_of(given[0], name);
    if (size < 1) fail("batch of less than one");
    Values out, line;
    for (const Value& item : items_of(value)) {
      if (static_cast<int64_t>(line.size()) == size) out.push_back(Value::list(std::exchange(line, {})));
      line.push_back(item);
    }
    if (!given[1].is_undefined() && !given[1].is_none() && !line.empty())
      while (static_cast<int64_t>(line.size()) < size) line.push_back(given[1]), step();
    if (!line.empty()) out.push_back(Value::list(std::move(line)));
    return Value::sequence(Flavour::kGenerator, std::move(out));
  }
  found = false;
  return {};
}

// Tests ----------------------------------------------------------------------------------------------------

bool Machine::test(const std::string& name, const Value& value, const Arguments& arguments) {
  using Kind = Value::Kind;
  const auto argument = [&] {
    const Values given = arguments.bind(str("the test ", name), {"other"});
    return given[0];
  };
  if (name == "in") return contains(argument(), value);
  const char* const comparison = is_one_of(name, {"eq", "==", "equalto"})      ? "=="
                                 : is_one_of(name, {"ne", "!="})               ? "!="
                                 : is_one_of(name, {"lt", "<", "lessthan"})    ? "<"
                                 : is_one_of(name, {"le", "<="})               ? "<="
                                 : is_one_of(name, {"gt", ">", "greaterthan"}) ? ">"
                                 : is_one_of(name, {"ge", ">="})               ? ">="
                                                                               : nullptr;
  if (comparison) return compare_values(comparison, value, argument());
  if (name == "divisibleby") {
    const Value by = argument();
    return equal(binary("%", value, by), Value::integer(0));
  }
  if (name == "sameas") {
    const Value other = argument();
    if (value.kind() != other.kind()) return false;
    if (value.is(Kind::kBool)) return value.as_bool() == other.as_bool();
    if (value.is_none()) return true;
    fail("the test sameas of ", value.type_name(), " is not supported");
  }
  arguments.bind(str("the test ", name), {});
  if (name == "defined") return !value.is_undefined();
  if (name == "undefined") return value.is_undefined();
  if (name == "none") return value.is_none();
  if (name == "string") return value.is_text();
  if (name == "mapping") return value.is_dict();
  if (name == "number") return value.is_number();
  if (name == "integer") return value.is(Kind::kInteger);
  if (name == "float") return value.is(Kind::kFloat);
  if (name == "boolean") return value.is(Kind::kBool);
  if (name == "true") return value.is(Kind::kBool) && value.as_bool();
  if (name == "false") return value.is(Kind::kBool) && !value.as_bool();
  if (name == "escaped") return value.is_markup();
  if (name == "iterable" || name == "sequence") {
    if (value.is_undefined() || value.is_text() || value.is_dict()) return true;
    if (value.is(Kind::kObject) && dynamic_cast<Loop*>(value.as_object()))
      fail("the test ", name, " of `loop` is not supported");
    return value.is_sequence() && (name == "iterable" || value.is(Flavour::kList) ||
                                   value.is(Flavour::kTuple) || value.is(Flavour::kRange));
  }
  if (name == "callable")
    return value.is(Kind::kMethod) || value.is(Kind::kFunction) || value.is_undefined() ||
           (value.is(Kind::kObject) && !dynamic_cast<Namespace*>(value.as_object()) &&
            !dynamic_cast<Cycler*>(value.as_object()));
  if (name == "odd" || name == "even")
    return equal(binary("%", value, Value::integer(2)), Value::integer(name == "odd" ? 1 : 0));
  if (name == "lower" || name == "upper")
    return text_method(Value::text(to_text(value)), name == "lower" ? "islower" : "isupper", {}).as_bool();
  fail("the test ", bough::quoted(name), " is not supported");
}

}  // namespace bough::jinja
