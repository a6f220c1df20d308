// Python's builtins: attributes, subscripts, functions and methods that chat templates use. If a template
// executes any other, an error names it.
#include <utf8proc.h>

#include <algorithm>

#include "base/error.h"
#include "text/chat_template_machine.h"
#include "text/chat_template_text.h"
#include "text/unicode_text.h"

namespace bough::jinja {
namespace {

// jinja2's sandbox hides methods that would change the list or dict. For a template they do not exist.
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

}  // namespace

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
  fail(value.type_name(), " has no length");
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
    default: fail(callee.type_name(), " cannot be called");
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
    if (by == 0) fail("the step of range is 0");
    Values items;
    for (int64_t i = begin; by > 0 ? i < end : i > end;) {
      items.push_back(Value::integer(i));
      if (items.size() > 100'000) fail("a range has more than 100000 items");
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
        if (given.empty() || !arguments.named.empty())
          fail("loop.cycle needs at least one value, without names");
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
      if (!is_hashable(given[0])) fail("get: ", given[0].type_name(), " cannot be a key of a dict");
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
    fail("index: the value is not in the list");
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
    if (at == std::string::npos && name.ends_with("index")) fail("index: the string is not found");
    return Value::integer(at == std::string::npos ? -1 : num_characters(std::string_view(s).substr(0, at)));
  }
  if (name == "join") {
    const Values given = bind({"iterable"});
    std::string out;
    bool first = true;
    if (given[0].is_undefined()) fail("join needs a sequence, got something undefined");
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
    if (separator.empty()) fail("partition: the separator is empty");
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
    // If the width is odd, Python's center puts the odd blank to the left.
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
      if (s[i] == '}' || end == std::string::npos) fail("a format string is malformed");
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
      else fail("there are fewer arguments than fields in the format string");
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
    if (used >= arguments.size()) fail("there are fewer arguments than fields in the format string");
    const Value& argument = arguments[used++];
    if (kind == 'd' || kind == 'i') out += std::to_string(integer_of(argument, "the format %d"));
    else out += kind == 'r' ? to_repr(argument) : to_text(argument);
    if (out.size() > (size_t{1} << 27)) fail("it makes a text that is too long");
  }
  if (used < arguments.size() && !(given.is_dict() || given.is(Flavour::kList)))
    fail("more arguments than fields of the format string are not supported");
  return text(std::move(out), format.is_markup());
}

}  // namespace bough::jinja
