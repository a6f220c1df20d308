// Jinja's filters and tests that chat templates use. If a template executes any other, an error names it.
#include <utf8proc.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "base/error.h"
#include "text/chat_template_machine.h"
#include "text/chat_template_text.h"

namespace bough::jinja {

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
    fail(bough::quoted(value.name()), " is undefined, expected a number");
  if (name == "abs") {
    bind({});
    if (!value.is_number()) fail("abs takes a number, got ", value.type_name());
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
    if (!value.is_number()) fail("round takes a number, got ", value.type_name());
    const std::string method = given[1].is_undefined() ? "common" : text_of(given[1], name);
    if (method == "common" && value.is_whole() && precision >= 0) return Value::integer(value.as_integer());
    if (precision < 0 || precision > 15) fail("round with this precision is not supported");
    if (method == "common") {
      char buffer[400];
      std::snprintf(buffer, sizeof buffer, "%.*f", static_cast<int>(precision), value.as_float());
      return Value::number(std::strtod(buffer, nullptr));
    }
    if (method != "ceil" && method != "floor") fail("unknown method of round: ", bough::quoted(method));
    const double scale = std::pow(10, precision);
    const double scaled = value.as_float() * scale;
    return Value::number((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale);
  }
  if (name == "attr") {
    const Values given = bind({"name"});
    if (value.is_dict() && !attribute(value, text_of(given[0], name)).is(Value::Kind::kMethod))
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
    if (!value.is_text()) fail("indent takes a string, got ", value.type_name());
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
    if (kept < 0) fail("truncate: the length is shorter than the end mark");
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

// Resolves a path such as `a.b.0` as Jinja's filters do: each part is first looked up as an item, then as an
// attribute.
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
  // A sort that throws halfway loses nothing, because it works on copies.
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
    if (name == "last" && value.is(Flavour::kGenerator)) fail("last takes a list, got a generator");
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
    if (!value.is_dict()) fail("the filter ", name, " takes a dict, got ", value.type_name());
    for (const auto& [key, item] : value.as_dict().items)
      out.push_back(Value::sequence(Flavour::kTuple, {key, item}));
    if (name == "items") return bind({}), Value::sequence(Flavour::kGenerator, std::move(out));
    const Values given = bind({"case_sensitive", "by", "reverse"});
    const std::string by = given[1].is_undefined() ? "key" : text_of(given[1], name);
    if (by != "key" && by != "value") fail("dictsort takes by = key or value, got ", bough::quoted(by));
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
        if (!is_hashable(key)) fail("unique cannot compare ", key.type_name());
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
    if (size < 1) fail("batch: the size must be at least 1");
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
