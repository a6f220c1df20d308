// Reads settings from YAML text and from the command line. yaml-cpp accepts input that must be an error here:
// duplicate keys, and text in place of a number. It also places an empty value on the next line. Therefore
// this file parses all values from the scalars' text, and takes line numbers from keys.
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "base/error.h"
#include "base/given_settings.h"
#include "base/peer_settings.h"
#include "base/settings.h"

namespace bough::internal {
namespace {

struct Given {
  std::string place;  // "run.yaml:7"
  std::string key;    // as it was spelled at that place
};

const char* kind_name(SettingKind kind) {
  switch (kind) {
    case SettingKind::kBool: return "true or false";
    case SettingKind::kInteger: return "a whole number";
    case SettingKind::kNumber: return "a number";
    case SettingKind::kText: return "a text";
    case SettingKind::kBytes: return "bytes such as 123, 512MiB, 40GiB, or auto";
    case SettingKind::kGroup: return "a group of settings";
  }
  return "";
}

// "a whole number, at least 1", "one of constant | cosine".
std::string expectation(const SettingField& field) {
  if (field.is_group_list())
    return str("a list of groups of settings such as [{", field.fields.front().key, ": ...}]",
               field.append_text ? ", or a text" : "");
  std::string out = field.shape == SettingShape::kList ? str("a list, each ", kind_name(field.kind))
                                                       : std::string(kind_name(field.kind));
  const std::string limits = field.constraint.describe();
  if (!field.constraint.choices.empty())
    out = (field.shape == SettingShape::kList ? "a list of " : "one of ") + limits;
  else if (!limits.empty()) out += ", " + limits;
  if (field.shape == SettingShape::kOptional) out += ", or null";
  return out;
}

bool is_quoted(const YAML::Node& node) {
  return node.Tag() == "!";
}

bool is_null(const YAML::Node& node) {
  if (node.IsNull()) return true;
  if (!node.IsScalar() || is_quoted(node)) return false;
  const std::string& text = node.Scalar();
  return text.empty() || text == "~" || text == "null" || text == "Null" || text == "NULL";
}

// The text that an error message shows for a node.
std::string shown(const YAML::Node& node) {
  if (is_null(node)) return "nothing";
  if (node.IsMap()) return "a group of keys";
  if (node.IsSequence()) return str("a list of ", node.size());
  return quoted(node.Scalar());
}

// The number if all of `text` is a number, else nullopt. As in YAML, a plus is accepted and 0x is refused.
std::optional<double> to_double(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  if (text.starts_with('+') || text.find_first_not_of("0123456789+-.eE") != std::string_view::npos) return {};
  double value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc() || end != text.data() + text.size()) return {};
  return value;
}

std::optional<int64_t> to_integer(std::string_view text) {
  if (text.starts_with('+') && !text.starts_with("+-")) text.remove_prefix(1);
  int64_t value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code == std::errc() && end == text.data() + text.size()) return value;
  // 1e6 and 4096.0 are whole numbers too. Beyond 2^53 a double is no longer an exact integer.
  const auto number = to_double(text);
  if (number && *number == std::floor(*number) && std::abs(*number) < 0x1p53)
    return static_cast<int64_t>(*number);
  return {};
}

// The scalar as Json of the field's type. nullopt if it has another type or violates the constraint.
std::optional<Json> to_value(const SettingField& field, const YAML::Node& node) {
  if (!node.IsScalar() || is_null(node)) return {};
  const std::string& text = node.Scalar();
  const Constraint& limits = field.constraint;
  const auto inside = [&](double value) {
    return value >= limits.low && value <= limits.high && !(limits.low_open && value == limits.low);
  };
  const bool typed = field.kind != SettingKind::kText && field.kind != SettingKind::kBytes;
  if (typed && is_quoted(node)) return {};
  switch (field.kind) {
    case SettingKind::kBool:
      if (text == "true" || text == "True" || text == "TRUE") return Json(true);
      if (text == "false" || text == "False" || text == "FALSE") return Json(false);
      return {};
    case SettingKind::kInteger:
      if (const auto value = to_integer(text); value && inside(static_cast<double>(*value)))
        return Json(*value);
      return {};
    case SettingKind::kNumber:
      if (const auto value = to_double(text); value && std::isfinite(*value) && inside(*value))
        return Json(*value);
      return {};
    case SettingKind::kText: {
      if (limits.not_empty && text.empty()) return {};
      if (limits.choices.empty()) return Json(text);
      for (const auto& [spelling, choice] : limits.spellings)
        if (text == spelling) return Json(choice);
      if (std::find(limits.choices.begin(), limits.choices.end(), text) == limits.choices.end()) return {};
      return Json(text);
    }
    case SettingKind::kBytes:
      try {
        const Bytes bytes = Bytes::parse(text);
        if (bytes.is_auto() || inside(static_cast<double>(bytes.count))) return Json(bytes.to_string());
      } catch (const UserError&) {  // the message of the caller says the same, with the line
      }
      return {};
    case SettingKind::kGroup: break;
  }
  return {};
}

class Reader {
 public:
  Reader(SettingField& root, const SettingAliases& aliases) : root_(root), aliases_(aliases) {}

  // Errors begin with the place of the node: "<source>:<line>" if has_lines, else `source` ("command line").
  std::string source;
  bool has_lines = false;

  void read_group(const SettingField* group, const YAML::Node& node, const std::string& prefix,
                  const std::string& spelled) {
    std::map<std::string, std::string> seen;  // key -> place, of this mapping
    for (const auto& entry : node) {
      const std::string place = place_of(entry.first);
      if (!entry.first.IsScalar())
        throw UserError(str(place, ": a key must be a word, got ", shown(entry.first)));
      const std::string& key = entry.first.Scalar();
      const std::string full_spelled = join_key(spelled, key);
      if (const auto [it, is_new] = seen.emplace(key, place); !is_new)
        throw UserError(str(place, ": ", quoted(full_spelled), " is given twice, first at ", it->second,
                            "; remove one of them"));
      read_entry(group, join_key(prefix, key), full_spelled, entry.second, place);
    }
  }

  // Returns the key that `spelled` stands for. An alias may also stand for a group that contains the key.
  std::string canonical(const std::string& spelled) const {
    std::string out;
    for (size_t begin = 0; begin <= spelled.size();) {
      const size_t end = std::min(spelled.find('.', begin), spelled.size());
      out = join_key(out, spelled.substr(begin, end - begin));
      for (const auto& [other, key] : aliases_)
        if (out == other) out = key;
      begin = end + 1;
    }
    return out;
  }

  // Adds the settings that were given, by key.
  void add_given(std::map<std::string, std::string>& places) const {
    for (const auto& [key, given] : given_) places[key] = given.place;
  }

  // `key` is canonical except for its last word.
  void read_entry(const SettingField* group, std::string key, const std::string& spelled,
                  const YAML::Node& value, const std::string& place) {
    for (const auto& [other, canonical] : aliases_)
      if (key == other) key = canonical;
    SettingField* field = find(key);
    const bool is_peer = value.IsMap() && value.size() > 0 && is_peer_group(key);
    const bool is_group = field ? field->is_group() : begins_alias(key) || is_peer;
    if (!field && !is_group) unknown(group, key, spelled, place);
    if (!is_group) return set(*field, key, spelled, value, place);
    if (is_null(value)) return;  // an empty group, for example if all its keys are commented out
    if (!value.IsMap())
      throw UserError(
          str(place, ": ", quoted(spelled), ": got ", shown(value), ", expected a group of settings"));
    read_group(field, value, key, spelled);
  }

  SettingField* find(const std::string& key) {
    SettingField* group = &root_;
    size_t begin = 0;
    while (true) {
      const size_t end = std::min(key.find('.', begin), key.size());
      const std::string_view name = std::string_view(key).substr(begin, end - begin);
      const auto it = std::find_if(group->fields.begin(), group->fields.end(),
                                   [&](const SettingField& field) { return field.key == name; });
      if (it == group->fields.end()) return nullptr;
      if (end == key.size()) return &*it;
      if (it->is_group_list()) return nullptr;  // its fields describe an element, not a setting
      group = &*it;
      begin = end + 1;
    }
  }

 private:
  std::string place_of(const YAML::Node& node) const {
    return has_lines && node.Mark().line >= 0 ? str(source, ":", node.Mark().line + 1) : source;
  }

  bool begins_alias(const std::string& key) const {
    return std::any_of(aliases_.begin(), aliases_.end(),
                       [&](const auto& alias) { return alias.first.starts_with(key + "."); });
  }

  void set(SettingField& field, const std::string& key, const std::string& spelled, const YAML::Node& node,
           const std::string& place) {
    if (const auto [it, is_new] = given_.emplace(key, Given{place, spelled}); !is_new)
      throw UserError(str(place, ": ", quoted(spelled), " is given twice, first at ", it->second.place,
                          it->second.key == spelled ? "" : " as " + quoted(it->second.key),
                          "; remove one of them"));
    const auto refuse = [&](const std::string& got) {
      throw UserError(str(place, ": ", quoted(spelled), ": got ", got, ", expected ", expectation(field)));
    };
    if (field.is_group_list()) return set_group_list(field, spelled, node, place, refuse);
    if (field.shape != SettingShape::kList) {
      if (field.shape == SettingShape::kOptional && is_null(node)) return field.set(nullptr);
      const auto value = to_value(field, node);
      if (!value) refuse(shown(node));
      return field.set(*value);
    }
    if (!node.IsSequence() || (field.constraint.not_empty && node.size() == 0)) refuse(shown(node));
    Json list = Json::array();
    for (const YAML::Node& element : node) {
      const auto value = to_value(field, element);
      if (!value) refuse(str(shown(element), " at position ", list.size()));
      list.push_back(*value);
    }
    field.set(list);
  }

  void set_group_list(SettingField& field, const std::string& spelled, const YAML::Node& node,
                      const std::string& place, const std::function<void(const std::string&)>& refuse) {
    field.clear();
    const auto append = [&](const YAML::Node& element, const std::string& name, const std::string& where) {
      if (element.IsScalar() && field.append_text && !is_null(element)) {
        try {
          return field.append_text(element.Scalar());
        } catch (const UserError& error) {
          throw UserError(str(where, ": ", quoted(name), ": ", error.what()));
        }
      }
      if (!element.IsMap())
        refuse(&element == &node ? shown(element) : "an element that is " + shown(element));
      field.append([&](SettingField& group) {
        Reader reader(group, kNoAliases);
        reader.source = source;
        reader.has_lines = has_lines;
        reader.read_group(&group, element, "", name);
        group.key = name;
        check_settings(group, where);
      });
    };
    const bool is_empty_text = node.IsScalar() && node.Scalar().empty() && field.append_text;
    if (is_empty_text || (node.IsSequence() && node.size() == 0 && !field.constraint.not_empty)) return;
    if (!node.IsSequence()) return append(node, spelled, place);
    for (size_t i = 0; i < node.size(); ++i) append(node[i], str(spelled, "[", i, "]"), place_of(node[i]));
    if (node.size() == 0) refuse(shown(node));
  }

  static void append_keys(const SettingField& group, const std::string& prefix,
                          std::vector<std::string>& out) {
    for (const SettingField& field : group.fields) {
      out.push_back(join_key(prefix, field.key));
      if (field.is_group_list()) continue;
      append_keys(field, std::string(out.back()), out);  // a copy, because `out` grows during the call
    }
  }

  static std::string nearest_of(const std::string& name, const std::vector<std::string>& candidates) {
    std::vector<const char*> pointers;
    for (const std::string& candidate : candidates) pointers.push_back(candidate.c_str());
    return nearest(name, pointers.data(), pointers.data() + pointers.size());
  }

  // "a.b.c", "b.c", "c"
  static std::vector<std::string> ends_of(const std::string& key) {
    std::vector<std::string> out = {key};
    for (size_t dot = key.find('.'); dot != std::string::npos; dot = key.find('.', dot + 1))
      out.push_back(key.substr(dot + 1));
    return out;
  }

  // Bough's key for the unknown `key` of another trainer. It is `target`, moved into the group of `key` if
  // that group has such a field: "critic.learning_rate" is critic.optimizer.lr. In settings with fewer groups
  // it is an end of `target`: "optimizer.lr". "" if there is none.
  std::string place_target(const std::string& target, std::string key) {
    while (!key.empty()) {
      const size_t dot = key.rfind('.');
      key.resize(dot == std::string::npos ? 0 : dot);
      for (const std::string& end : ends_of(target))
        if (const std::string moved = join_key(key, end); find(moved)) return moved;
    }
    return "";
  }

  // The end of the message about an unknown key that another trainer has. "" if none has it.
  std::string peer_advice(const std::string& key) {
    std::string name = key;
    std::replace(name.begin(), name.end(), '-', '_');
    for (const std::string& end : ends_of(name))
      for (const PeerSetting& row : peer_settings()) {
        if (row.name != end) continue;
        if (row.key.empty()) return str("; ", row.note);
        const std::string target = place_target(std::string(row.key), key);
        if (target.empty()) continue;
        return str("; did you mean ", quoted(target), row.note.empty() ? "" : str(" (", row.note, ")"), "?");
      }
    return "";
  }

  // Suggests a known key: first the key for another trainer's name, then the nearest key of the same group,
  // then a key of the same name in another group, then the nearest full key.
  [[noreturn]] void unknown(const SettingField* group, const std::string& key, const std::string& spelled,
                            const std::string& place) {
    if (group && group->is_group_list())
      throw UserError(str(place, ": ", quoted(spelled), ": ", quoted(group->key),
                          " is a list; give all of it, as ", group->key, "='[{...}, {...}]'"));
    const std::string wrong = str(place, ": unknown setting ", quoted(spelled));
    if (const std::string advice = peer_advice(key); !advice.empty()) throw UserError(wrong + advice);
    const size_t dot = key.rfind('.');
    const std::string prefix = dot == std::string::npos ? "" : key.substr(0, dot);
    const std::string name = dot == std::string::npos ? key : key.substr(dot + 1);
    std::vector<std::string> all, siblings;
    append_keys(root_, "", all);
    if (group)
      for (const SettingField& field : group->fields) siblings.push_back(field.key);
    std::string suggestion = nearest_of(name, siblings);
    if (!suggestion.empty()) {
      suggestion = join_key(prefix, suggestion);
    } else {
      const auto has_name = [&](const std::string& other) {
        return other == name || other.ends_with("." + name);
      };
      const auto elsewhere = std::find_if(all.begin(), all.end(), has_name);
      // The groups of other trainers say nothing about the group here, so the name must be the only one.
      const bool is_peer = is_peer_group(key);
      if (!is_peer && elsewhere == all.end()) suggestion = nearest_of(key, all);
      else if (!is_peer || std::count_if(all.begin(), all.end(), has_name) == 1) suggestion = *elsewhere;
    }
    if (!suggestion.empty()) throw UserError(str(wrong, "; did you mean ", quoted(suggestion), "?"));
    if (!siblings.empty()) throw UserError(str(wrong, "; known here: ", some_of(siblings)));
    throw UserError(wrong + (is_peer_group(key) ? "; docs/coming_from.md has Bough's settings" : ""));
  }

  static std::string some_of(const std::vector<std::string>& names) {
    constexpr size_t kMost = 12;
    std::string out;
    for (size_t i = 0; i < std::min(names.size(), kMost); ++i) out += (i ? ", " : "") + names[i];
    return names.size() > kMost ? out + ", …" : out;
  }

  static inline const SettingAliases kNoAliases;  // elements of lists have no aliases

  SettingField& root_;
  const SettingAliases& aliases_;
  std::map<std::string, Given> given_;  // canonical key -> where it was set
};

// Rethrows an error of yaml-cpp with the line in the form of our messages. yaml-cpp counts lines from 0.
[[noreturn]] void bad_yaml(const YAML::Exception& error, const std::string& source, bool has_lines) {
  const bool known = has_lines && error.mark.line >= 0;
  throw UserError(str(source, known ? str(":", error.mark.line + 1) : "", ": not valid YAML: ", error.msg));
}

// The value after "key=". For text fields it is taken literally unless quoted. For other fields it is parsed
// as YAML.
YAML::Node override_value(const SettingField* field, const std::string& text) {
  const bool is_short_form = field && field->is_group_list() && field->append_text &&
                             !text.starts_with('[') && !text.starts_with('{');
  const bool is_text =
      is_short_form || (field && field->kind == SettingKind::kText && field->shape != SettingShape::kList);
  const bool is_quoted = text.starts_with('"') || text.starts_with('\'');
  const bool empties = field && field->shape == SettingShape::kOptional && (text.empty() || text == "null");
  if (is_text && !is_quoted && !empties) {
    YAML::Node node(text);
    node.SetTag("!");  // a text, whatever it looks like
    return node;
  }
  return YAML::Load(text);
}

// `places`: gets the place of each given setting, by key.
void read_yaml(SettingField& root, const SettingAliases& aliases, const std::string& yaml,
               const std::string& source, std::map<std::string, std::string>& places) {
  std::vector<YAML::Node> documents;
  try {
    documents = YAML::LoadAll(yaml);
    if (documents.size() > 1)
      throw UserError(str(source, ": ", documents.size(), " YAML documents, expected one"));
    if (documents.empty() || is_null(documents[0])) return;  // all settings keep their defaults
    if (!documents[0].IsMap())
      throw UserError(
          str(source, ": got ", shown(documents[0]), ", expected settings as 'key: value' lines"));
    Reader reader(root, aliases);
    reader.source = source;
    reader.has_lines = true;
    reader.read_group(&root, documents[0], "", "");
    reader.add_given(places);
  } catch (const YAML::Exception& error) {
    bad_yaml(error, source, true);
  }
}

void read_overrides(SettingField& root, const SettingAliases& aliases,
                    const std::vector<std::string>& overrides, std::map<std::string, std::string>& places) {
  for (const std::string& text : overrides) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0)
      throw UserError(
          str("command line: got ", quoted(text), ", expected key=value, such as actor.eps_clip=0.2"));
    const std::string spelled = text.substr(0, equals);
    Reader reader(root, aliases);
    reader.source = "command line";
    const std::string key = reader.canonical(spelled);
    try {
      const YAML::Node value = override_value(reader.find(key), text.substr(equals + 1));
      const size_t dot = key.rfind('.');
      const SettingField* group = dot == std::string::npos ? &root : reader.find(key.substr(0, dot));
      reader.read_entry(group, key, spelled, value, "command line");
      reader.add_given(places);
    } catch (const YAML::Exception& error) {
      bad_yaml(error, str("command line: ", quoted(spelled)), false);
    }
  }
}

}  // namespace

void read_settings(SettingField& root, const SettingAliases& aliases, const std::string& yaml,
                   const std::string& source) {
  std::map<std::string, std::string> places;
  read_yaml(root, aliases, yaml, source, places);
}

void override_settings(SettingField& root, const SettingAliases& aliases,
                       const std::vector<std::string>& overrides) {
  std::map<std::string, std::string> places;
  read_overrides(root, aliases, overrides, places);
}

std::vector<GivenSetting> given_settings(SettingField& root, const SettingAliases& aliases,
                                         const std::string& yaml, const std::string& source,
                                         const std::vector<std::string>& overrides) {
  std::map<std::string, std::string> places;
  read_yaml(root, aliases, yaml, source, places);
  read_overrides(root, aliases, overrides, places);
  std::vector<GivenSetting> given;
  for (const auto& [key, place] : places) given.push_back({key, place});
  return given;
}

}  // namespace bough::internal
