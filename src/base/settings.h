// Settings: each component has a struct with one function visit() over its fields. Reading YAML, command line
// overrides, help, printing, JSON and comparison all use visit().
//
//   struct OptimizerSettings {
//     double lr = 1e-5;
//     std::string schedule = "constant";
//     template <class V> void visit(V& v) {
//       v("lr", lr, "peak learning rate", range(0.0, 10.0));          // the constraint is optional
//       v("schedule", schedule, "shape after warm-up", one_of({"constant", "cosine"}));
//     }
//     void check() const;  // optional: constraints between fields; throws UserError
//     void complete();     // optional: sets fields that follow from others; runs before check()
//   };
//
// Types of fields: bool, int64_t, double, std::string, Bytes, std::optional and std::vector of these, structs
// with a visit() (groups), and std::vector of such structs (lists of groups). For a list of groups, YAML may
// give a single group instead of a list. The element struct may also have a short form, a text that stands
// for a list of one element. It then defines
//   static Entry from_text(const std::string& text);      // throws UserError
//   std::optional<std::string> to_text() const;           // nullopt if only the long form can express it
// The empty text is the empty list. A root struct may accept alternative spellings of dotted keys. A spelling
// of a group's key also works in the keys of the group's fields:
//   static SettingAliases aliases();  // {{"spelling", "key"}, ...}
//
// Every error is a UserError that begins with "file:line: " or "command line: " and names the key, the value
// and the expected values. For an unknown key the message suggests a known one (base/peer_settings.h has
// other trainers' names), for a repeated key both lines. Numbers must be finite. `null` (or nothing after the
// colon) empties an optional field. For fields that are not optional it is an error.
#pragma once

#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/json.h"

namespace bough {

// An amount of memory: 123, "40GiB", "1.5 GB", "512MiB", or "auto" if it is measured at start.
struct Bytes {
  static constexpr int64_t kAuto = -1;
  int64_t count = kAuto;

  bool is_auto() const { return count == kAuto; }
  bool operator==(const Bytes&) const = default;

  // Throws UserError without file and key: the caller adds them.
  static Bytes parse(std::string_view text);
  std::string to_string() const;  // the text that parses to the same value: "40GiB", "123", "auto"
};

// Constraint on a value, besides its type. In a list, each element must satisfy it.
struct Constraint {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool low_open = false;             // low itself is not allowed
  bool not_empty = false;            // texts and lists
  std::vector<std::string> choices;  // texts; empty: any text
  std::vector<std::pair<std::string, std::string>>
      spellings;  // other words for a choice: {"disabled", "dense"}

  std::string describe() const;  // "0 to 10", "at least 1", "constant | cosine"; "" if there is none
};

Constraint range(double low, double high);  // both included
Constraint at_least(double low);
Constraint above(double low);  // low not included
Constraint one_of(std::vector<std::string> choices);
// Like one_of(). `spellings`: pairs {accepted word, the choice that the word stands for}.
Constraint aliased(std::vector<std::string> choices,
                   std::vector<std::pair<std::string, std::string>> spellings);
Constraint not_empty();

enum class SettingKind { kBool, kInteger, kNumber, kText, kBytes, kGroup };
enum class SettingShape { kSingle, kOptional, kList };

// A field, or a group of fields, of one settings object. The settings object must outlive it.
struct SettingField {
  std::string key;  // last part of the dotted key
  std::string help;
  Constraint constraint;
  SettingKind kind = SettingKind::kGroup;
  SettingShape shape = SettingShape::kSingle;
  std::function<Json()> get;              // Bytes as text, an empty optional as null
  std::function<void(const Json&)> set;   // the value must have the right type
  std::vector<SettingField> fields;       // the group's fields; list of groups: those of a default element
  std::function<void()> check, complete;  // groups only, may be empty

  // For lists of groups only. clear() empties the list. append() adds an element; `fill` sets its fields.
  // append_text() adds the element that the short form `text` stands for; empty if there is no short form.
  std::function<void()> clear;
  std::function<void(const std::function<void(SettingField& element)>& fill)> append;
  std::function<void(const std::string& text)> append_text;

  bool is_group() const { return kind == SettingKind::kGroup && shape == SettingShape::kSingle; }
  bool is_group_list() const { return kind == SettingKind::kGroup && shape == SettingShape::kList; }
};

struct SettingDifference {
  std::string key;   // dotted
  std::string left;  // values as in YAML
  std::string right;
};

struct SettingRow {
  std::string key;    // dotted
  std::string value;  // as in YAML
  std::string help;
  bool is_default;
};

using SettingAliases = std::vector<std::pair<std::string, std::string>>;

namespace internal {

// "prefix.key", or "key" if the prefix is empty.
std::string join_key(const std::string& prefix, const std::string& key);

template <class T>
struct SettingType;  // undefined in general: a field of any other type than the following is no setting
template <>
struct SettingType<bool> {
  static constexpr auto kind = SettingKind::kBool;
};
template <>
struct SettingType<int64_t> {
  static constexpr auto kind = SettingKind::kInteger;
};
template <>
struct SettingType<double> {
  static constexpr auto kind = SettingKind::kNumber;
};
template <>
struct SettingType<std::string> {
  static constexpr auto kind = SettingKind::kText;
};
template <>
struct SettingType<Bytes> {
  static constexpr auto kind = SettingKind::kBytes;
};

template <class T>
Json setting_to_json(const T& value) {
  return value;
}
inline Json setting_to_json(const Bytes& value) {
  return value.to_string();
}
template <class T>
T setting_from_json(const Json& value) {
  if constexpr (std::is_same_v<T, Bytes>) return Bytes::parse(value.template get<std::string>());
  else return value.template get<T>();
}

// The visitor: turns the fields of a struct into SettingField.
class SettingCollector {
 public:
  explicit SettingCollector(std::vector<SettingField>& out) : out_(out) {}

  template <class T>
  void operator()(const char* key, T& value, const char* help, Constraint constraint = {}) {
    SettingField& field = add(key, help, std::move(constraint));
    if constexpr (requires(SettingCollector & v) { value.visit(v); }) {
      SettingCollector inner(field.fields);
      value.visit(inner);
      if constexpr (requires(const T& t) { t.check(); })
        field.check = [&value] { std::as_const(value).check(); };
      if constexpr (requires(T & t) { t.complete(); }) field.complete = [&value] { value.complete(); };
    } else {
      field.kind = SettingType<T>::kind;
      field.get = [&value] { return setting_to_json(value); };
      field.set = [&value](const Json& json) { value = setting_from_json<T>(json); };
    }
  }
  template <class T>
  void operator()(const char* key, std::optional<T>& value, const char* help, Constraint constraint = {}) {
    SettingField& field = add(key, help, std::move(constraint));
    field.kind = SettingType<T>::kind;
    field.shape = SettingShape::kOptional;
    field.get = [&value] { return value ? setting_to_json(*value) : Json(nullptr); };
    field.set = [&value](const Json& json) {
      if (json.is_null()) value.reset();
      else value = setting_from_json<T>(json);
    };
  }
  template <class T>
  void operator()(const char* key, std::vector<T>& value, const char* help, Constraint constraint = {}) {
    SettingField& field = add(key, help, std::move(constraint));
    field.shape = SettingShape::kList;
    if constexpr (requires(T & element, SettingCollector & v) { element.visit(v); }) {
      collect_group_list(field, value);
    } else {
      field.kind = SettingType<T>::kind;
      field.get = [&value] {
        Json list = Json::array();
        for (size_t i = 0; i < value.size(); ++i)
          list.push_back(setting_to_json(static_cast<const T&>(value[i])));
        return list;
      };
      field.set = [&value](const Json& json) {
        value.clear();
        for (const Json& element : json) value.push_back(setting_from_json<T>(element));
      };
    }
  }

 private:
  SettingField& add(const char* key, const char* help, Constraint constraint);

  template <class T>
  static void collect_group_list(SettingField& field, std::vector<T>& value) {
    const auto describe = [](T& element, std::vector<SettingField>& out) {
      SettingCollector collector(out);
      collector("", element, "");
    };
    const auto prototype = std::make_shared<T>();  // `fields` refer to this object
    std::vector<SettingField> holder;
    describe(*prototype, holder);
    field.fields = std::move(holder.front().fields);
    field.get = [&value, prototype, describe] {
      if constexpr (requires(const T& element) { element.to_text(); }) {
        if (value.empty()) return Json("");
        if (value.size() == 1)
          if (const auto text = value.front().to_text()) return Json(*text);
      }
      Json list = Json::array();
      for (const T& element : value) {
        T copy = element;
        std::vector<SettingField> fields, defaults;
        describe(copy, fields);
        describe(*prototype, defaults);
        list.push_back(changed_values(fields.front(), defaults.front()));
      }
      return list;
    };
    field.clear = [&value] { value.clear(); };
    field.append = [&value, describe](const std::function<void(SettingField&)>& fill) {
      T element;
      std::vector<SettingField> fields;
      describe(element, fields);
      fill(fields.front());
      value.push_back(std::move(element));
    };
    if constexpr (requires(const std::string& text) { T::from_text(text); })
      field.append_text = [&value](const std::string& text) {
        if (!text.empty()) value.push_back(T::from_text(text));
      };
  }
  // The values of the group that differ from the defaults.
  static Json changed_values(const SettingField& group, const SettingField& defaults);

  std::vector<SettingField>& out_;
};

void read_settings(SettingField& root, const SettingAliases& aliases, const std::string& yaml,
                   const std::string& source);
void override_settings(SettingField& root, const SettingAliases& aliases,
                       const std::vector<std::string>& overrides);
// Runs complete() and check() of all groups. Returns the message of the first failure, or "". Elements of
// lists of groups are left out, because they were checked when they were read.
std::string what_is_wrong(const SettingField& root);
void check_settings(const SettingField& root, const std::string& source);  // throws UserError
void complete_settings(const SettingField& root);                          // runs complete() of all groups
std::string help_text(const SettingField& root);
std::string yaml_text(const SettingField& root);
Json json_value(const SettingField& root);
std::vector<SettingDifference> differences(const SettingField& left, const SettingField& right);
std::vector<SettingRow> rows(const SettingField& root, const SettingField& defaults);
std::string read_settings_file(const std::filesystem::path& path);

template <class S>
SettingAliases aliases_of() {
  if constexpr (requires { S::aliases(); }) return S::aliases();
  else return {};
}
}  // namespace internal

// Returns the fields of `settings`, which must outlive the result.
template <class S>
SettingField describe_settings(S& settings) {
  std::vector<SettingField> holder;
  internal::SettingCollector collector(holder);
  collector("", settings, "");
  return std::move(holder.front());
}

// Starts from the defaults, applies the YAML text, then the overrides, then runs every complete() and
// check(). An override is "dotted.key=value" with a YAML value; for a text field, the value is taken
// literally unless it begins with a quotation mark. Later overrides win. `source` names the YAML text in
// errors. Throws UserError.
template <class S>
S parse_settings(const std::string& yaml, const std::string& source,
                 const std::vector<std::string>& overrides = {}) {
  S settings;
  SettingField root = describe_settings(settings);
  internal::read_settings(root, internal::aliases_of<S>(), yaml, source);
  internal::override_settings(root, internal::aliases_of<S>(), overrides);
  const std::string wrong = internal::what_is_wrong(root);
  if (wrong.empty()) return settings;
  S alone;
  SettingField of_file = describe_settings(alone);
  internal::read_settings(of_file, internal::aliases_of<S>(), yaml, source);
  throw UserError((internal::what_is_wrong(of_file) == wrong ? source : "command line") + ": " + wrong);
}

template <class S>
S load_settings(const std::filesystem::path& path, const std::vector<std::string>& overrides = {}) {
  return parse_settings<S>(internal::read_settings_file(path), path.string(), overrides);
}

// Help text with a line for each key: name, default, help, constraint. Aliases are not listed.
template <class S>
std::string settings_help(S defaults = {}) {
  return internal::help_text(describe_settings(defaults));
}

// YAML text that parses to the same settings; doubles are bitwise equal.
template <class S>
std::string settings_yaml(S settings) {
  return internal::yaml_text(describe_settings(settings));
}

template <class S>
Json settings_json(S settings) {
  return internal::json_value(describe_settings(settings));
}

// The keys in which two settings differ, with both values. Resuming a run reports them.
template <class S>
std::vector<SettingDifference> settings_diff(S left, S right) {
  return internal::differences(describe_settings(left), describe_settings(right));
}

// Every setting with its value. The start of a run lists those that differ from their defaults, as complete()
// sets them if nothing is given.
template <class S>
std::vector<SettingRow> settings_rows(S settings) {
  S defaults;
  const SettingField of_defaults = describe_settings(defaults);
  internal::complete_settings(of_defaults);
  return internal::rows(describe_settings(settings), of_defaults);
}

}  // namespace bough
