#include "base/settings.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/error.h"
#include "base/file.h"
#include "base/format.h"

namespace bough {

// ---- Bytes ----

namespace {
struct Unit {
  const char* name;
  int64_t size;
};
constexpr Unit kUnits[] = {{"", 1},
                           {"B", 1},
                           {"KiB", int64_t{1} << 10},
                           {"MiB", int64_t{1} << 20},
                           {"GiB", int64_t{1} << 30},
                           {"TiB", int64_t{1} << 40},
                           {"kB", 1000},
                           {"KB", 1000},
                           {"MB", 1000'000},
                           {"GB", 1000'000'000},
                           {"TB", 1000'000'000'000}};
}  // namespace

Bytes Bytes::parse(std::string_view text) {
  if (text == "auto") return {};
  double number = 0;
  const auto [end, code] =
      std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  std::string_view rest = text.substr(static_cast<size_t>(end - text.data()));
  rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
  const auto* unit =
      std::find_if(std::begin(kUnits), std::end(kUnits), [&](const Unit& u) { return rest == u.name; });
  if (code != std::errc() || unit == std::end(kUnits) || !(number >= 0))
    throw UserError(str("got ", quoted(text), ", expected bytes such as 123, 512MiB, 40GiB, or auto"));
  const double count = number * static_cast<double>(unit->size);
  if (count >= 0x1p62) throw UserError(str("got ", quoted(text), ", expected less than 4 EiB"));
  int64_t whole = 0;  // integers above 2^53 keep all their digits
  const auto integer = std::from_chars(text.data(), end, whole);
  if (integer.ec == std::errc() && integer.ptr == end) return {whole * unit->size};
  return {std::llround(count)};
}

std::string Bytes::to_string() const {
  if (is_auto()) return "auto";
  for (int i = 5; i >= 2; --i)
    if (count > 0 && count % kUnits[i].size == 0)
      return std::to_string(count / kUnits[i].size) + kUnits[i].name;
  return std::to_string(count);
}

// ---- Constraints ----

Constraint range(double low, double high) {
  return {.low = low, .high = high};
}
Constraint at_least(double low) {
  return {.low = low};
}
Constraint above(double low) {
  return {.low = low, .low_open = true};
}
Constraint not_empty() {
  return {.not_empty = true};
}
Constraint one_of(std::vector<std::string> choices) {
  return {.choices = std::move(choices)};
}
Constraint aliased(std::vector<std::string> choices,
                   std::vector<std::pair<std::string, std::string>> spellings) {
  return {.choices = std::move(choices), .spellings = std::move(spellings)};
}

std::string Constraint::describe() const {
  std::string out;
  for (const std::string& choice : choices) out += (out.empty() ? "" : " | ") + choice;
  if (!out.empty()) return out;
  const bool has_low = std::isfinite(low), has_high = std::isfinite(high);
  if (has_low && has_high) {
    if (low_open) return str("above ", format_shortest(low), ", at most ", format_shortest(high));
    return str(format_shortest(low), " to ", format_shortest(high));
  }
  if (has_low) return str(low_open ? "above " : "at least ", format_shortest(low));
  if (has_high) return "at most " + format_shortest(high);
  return not_empty ? "not empty" : "";
}

namespace internal {

std::string join_key(const std::string& prefix, const std::string& key) {
  return prefix.empty() ? key : prefix + "." + key;
}

SettingField& SettingCollector::add(const char* key, const char* help, Constraint constraint) {
  for (const SettingField& field : out_) BOUGH_CHECK(field.key != key, "two settings named ", key);
  SettingField& field = out_.emplace_back();
  field.key = key;
  field.help = help;
  field.constraint = std::move(constraint);
  return field;
}

Json SettingCollector::changed_values(const SettingField& group, const SettingField& defaults) {
  Json out = Json::object();
  for (size_t i = 0; i < group.fields.size(); ++i) {
    Json value = json_value(group.fields[i]);
    if (value != json_value(defaults.fields[i])) out[group.fields[i].key] = std::move(value);
  }
  return out;
}

std::string read_settings_file(const std::filesystem::path& path) {
  return read_file(path);
}

std::string what_is_wrong(const SettingField& root) {
  if (root.is_group_list()) return "";  // its elements were checked one by one
  const auto message_of = [&](const std::function<void()>& function) -> std::string {
    if (!function) return "";
    try {
      function();
      return "";
    } catch (const UserError& error) {
      return str(root.key.empty() ? "" : root.key + ": ", error.what());
    }
  };
  std::string wrong = message_of(root.complete);
  for (const SettingField& field : root.fields)
    if (wrong.empty()) wrong = what_is_wrong(field);
  return wrong.empty() ? message_of(root.check) : wrong;
}

void complete_settings(const SettingField& root) {
  if (root.complete) root.complete();
  for (const SettingField& field : root.fields) complete_settings(field);
}

void check_settings(const SettingField& root, const std::string& source) {
  const std::string wrong = what_is_wrong(root);
  if (!wrong.empty()) throw UserError(source + ": " + wrong);
}

// ---- Values as YAML ----

namespace {

// True if parsers of YAML 1.1 and 1.2 read the unquoted text as a text, and not as a number, a date, a
// boolean or null.
bool is_plain(const std::string& text) {
  static const char* const kWords[] = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"};
  if (text.empty()) return false;
  std::string lower;
  for (const char c : text) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    const bool inner = (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '/' || c == '-' || c == '+';
    if (!letter && !inner) return false;
    lower += letter ? static_cast<char>(c | 0x20) : c;
  }
  const char first = lower[0];
  if (first != '/' && first != '_' && !(first >= 'a' && first <= 'z')) return false;
  return std::none_of(std::begin(kWords), std::end(kWords), [&](const char* word) { return lower == word; });
}

// JSON's quoting is valid YAML, except that YAML requires escapes for DEL, the C1 controls, Unicode's line
// breaks and the byte order mark. (Escaping all non-ASCII characters does not work: yaml-cpp refuses JSON's
// surrogate pairs.)
std::string quoted_yaml(const Json& text) {
  const std::string json = dump_line(text);
  std::string out;
  for (size_t i = 0; i < json.size();) {
    const auto at = [&](size_t k) {
      return i + k < json.size() ? static_cast<unsigned char>(json[i + k]) : 0;
    };
    unsigned code = 0;
    size_t length = 1;
    if (at(0) == 0x7F) code = 0x7F;
    else if (at(0) == 0xC2 && at(1) < 0xA0) code = at(1), length = 2;
    else if (at(0) == 0xE2 && at(1) == 0x80 && (at(2) == 0xA8 || at(2) == 0xA9))
      code = 0x2000u | (at(2) - 0x80u), length = 3;
    else if (at(0) == 0xEF && at(1) == 0xBB && at(2) == 0xBF) code = 0xFEFF, length = 3;
    if (code == 0) {
      out += json[i];
    } else {
      static const char* const kHex = "0123456789ABCDEF";
      out += "\\u";
      for (int shift = 12; shift >= 0; shift -= 4) out += kHex[code >> shift & 15];
    }
    i += length;
  }
  return out;
}

std::string number_text(double value) {
  std::string text = format_shortest(value);
  // YAML 1.1 parsers take "1e-05" as a text and "1" as an integer. So a floating-point number needs a point.
  if (text.find('.') == std::string::npos) text.insert(std::min(text.find('e'), text.size()), ".0");
  return text;
}

std::string value_text(const Json& value) {
  if (value.is_null()) return "null";
  if (value.is_number_float()) return number_text(value.get<double>());
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    return is_plain(text) ? text : quoted_yaml(value);
  }
  if (value.is_array()) {
    std::string out;
    for (const Json& element : value) out += (out.empty() ? "" : ", ") + value_text(element);
    return "[" + out + "]";
  }
  if (value.is_object()) {
    std::string out;
    for (const auto& [key, element] : value.items())
      out += (out.empty() ? "" : ", ") + key + ": " + value_text(element);
    return "{" + out + "}";
  }
  return value.dump();
}

void append_yaml(const SettingField& group, int indent, std::string& out) {
  for (const SettingField& field : group.fields) {
    out.append(static_cast<size_t>(indent), ' ');
    out += field.key + ":";
    if (field.is_group()) {
      out += field.fields.empty() ? " {}\n" : "\n";
      append_yaml(field, indent + 2, out);
    } else {
      out += " " + value_text(field.get()) + "\n";
    }
  }
}

using Leaves = std::vector<std::pair<std::string, const SettingField*>>;
void append_leaves(const SettingField& group, const std::string& prefix, Leaves& out) {
  for (const SettingField& field : group.fields) {
    const std::string key = internal::join_key(prefix, field.key);
    if (field.is_group()) append_leaves(field, key, out);
    else out.emplace_back(key, &field);
  }
}

Leaves leaves_of(const SettingField& root) {
  Leaves out;
  append_leaves(root, "", out);
  return out;
}
}  // namespace

std::string yaml_text(const SettingField& root) {
  std::string out;
  append_yaml(root, 0, out);
  return out.empty() ? "{}\n" : out;
}

Json json_value(const SettingField& root) {
  if (!root.is_group()) return root.get();
  Json out = Json::object();
  for (const SettingField& field : root.fields) out[field.key] = json_value(field);
  return out;
}

std::string help_text(const SettingField& root) {
  Leaves leaves;
  for (const auto& [key, field] : leaves_of(root)) {
    leaves.emplace_back(key, field);
    if (field->is_group_list()) append_leaves(*field, key + "[]", leaves);
  }
  constexpr size_t kWidestColumn = 44;  // a longer key pushes only its own line
  size_t width = 0;
  std::vector<std::string> heads;
  for (const auto& [key, field] : leaves) {
    heads.push_back(key + ": " + value_text(field->get()));
    if (heads.back().size() <= kWidestColumn) width = std::max(width, heads.back().size());
  }
  std::string out;
  for (size_t i = 0; i < leaves.size(); ++i) {
    const SettingField& field = *leaves[i].second;
    std::string limits = field.constraint.describe();
    for (const auto& [spelling, choice] : field.constraint.spellings)
      limits += str("; ", spelling, " = ", choice);
    heads[i].resize(std::max(width, heads[i].size()), ' ');
    out += "  " + heads[i] + "  " + field.help + (limits.empty() ? "" : " (" + limits + ")") + "\n";
  }
  return out;
}

std::vector<SettingDifference> differences(const SettingField& left, const SettingField& right) {
  const Leaves left_leaves = leaves_of(left), right_leaves = leaves_of(right);
  BOUGH_CHECK(left_leaves.size() == right_leaves.size(), "settings of different types");
  std::vector<SettingDifference> out;
  for (size_t i = 0; i < left_leaves.size(); ++i) {
    const Json a = left_leaves[i].second->get(), b = right_leaves[i].second->get();
    if (a != b) out.push_back({left_leaves[i].first, value_text(a), value_text(b)});
  }
  return out;
}

std::vector<SettingRow> rows(const SettingField& root, const SettingField& defaults) {
  const Leaves leaves = leaves_of(root), default_leaves = leaves_of(defaults);
  std::vector<SettingRow> out;
  for (size_t i = 0; i < leaves.size(); ++i) {
    const Json value = leaves[i].second->get();
    out.push_back({leaves[i].first, value_text(value), leaves[i].second->help,
                   value == default_leaves[i].second->get()});
  }
  return out;
}

}  // namespace internal
}  // namespace bough
