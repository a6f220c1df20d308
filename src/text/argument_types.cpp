#include "text/argument_types.h"

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace bough {
namespace {

// The types of JSON values, as bits.
enum Types { kString = 1, kNumber = 2, kBoolean = 4, kNull = 8, kArray = 16, kObject = 32, kAnyType = 63 };

int type_named(const OrderedJson& name) {
  for (const auto& [type, names] : std::initializer_list<std::pair<int, std::vector<std::string_view>>>{
           {kString, {"string", "str", "text"}},
           {kNumber, {"number", "integer", "int", "float", "double"}},
           {kBoolean, {"boolean", "bool"}},
           {kNull, {"null", "none"}},
           {kArray, {"array", "list", "tuple"}},
           {kObject, {"object", "dict"}},
           {kAnyType, {"any"}}})
    if (name.is_string() && std::find(names.begin(), names.end(), name) != names.end()) return type;
  return kAnyType & ~kString;
}

int type_of_value(const OrderedJson& value) {
  return value.is_string()    ? kString
         : value.is_number()  ? kNumber
         : value.is_boolean() ? kBoolean
         : value.is_null()    ? kNull
         : value.is_array()   ? kArray
                              : kObject;
}

// Reads the types that a tool's JSON schema allows its arguments. References (#/$defs/...) are local to the
// schema.
class ArgumentTypes {
 public:
  explicit ArgumentTypes(const OrderedJson& schema) : root_(schema) {}

  // The types that argument `key` may have. Nullopt if the schema does not have it.
  std::optional<int> argument(const std::string& key) const { return argument(root_, key, 0); }

 private:
  static constexpr int kMostReferences = 32;

  const OrderedJson* target(const OrderedJson& schema) const {
    const auto found = schema.find("$ref");
    if (found == schema.end() || !found->is_string()) return nullptr;
    const auto& reference = found->get_ref<const std::string&>();
    if (!reference.starts_with('#')) return nullptr;
    try {
      return &root_.at(OrderedJson::json_pointer(reference.substr(1)));
    } catch (const OrderedJson::exception&) {
      return nullptr;
    }
  }

  template <class Part>
  static void for_each(const OrderedJson& schema, const char* name, const Part& part) {
    if (const auto found = schema.find(name); found != schema.end() && found->is_array())
      for (const OrderedJson& each : *found) part(each);
  }

  int types(const OrderedJson& schema, int depth) const {
    if (!schema.is_object() || depth > kMostReferences) return kAnyType;
    int all = kAnyType;
    if (const OrderedJson* other = target(schema)) all &= types(*other, depth + 1);
    if (const auto type = schema.find("type"); type != schema.end() && type->is_array()) {
      int any = 0;
      for (const OrderedJson& each : *type) any |= type_named(each);
      all &= any;
    } else if (type != schema.end()) {
      all &= type_named(*type);
    }
    if (const auto value = schema.find("const"); value != schema.end()) all &= type_of_value(*value);
    int values = 0;
    for_each(schema, "enum", [&](const OrderedJson& each) { values |= type_of_value(each); });
    if (values != 0) all &= values;
    for_each(schema, "allOf", [&](const OrderedJson& each) { all &= types(each, depth + 1); });
    for (const char* name : {"anyOf", "oneOf"}) {
      int any = 0;
      for_each(schema, name, [&](const OrderedJson& each) { any |= types(each, depth + 1); });
      if (any != 0) all &= any;
    }
    if (all == kAnyType && schema.contains("properties")) all = kObject;
    if (all == kAnyType && schema.contains("items")) all = kArray;
    if (all != kAnyType && schema.value("nullable", OrderedJson()) == true) all |= kNull;
    return all;
  }

  std::optional<int> argument(const OrderedJson& schema, const std::string& key, int depth) const {
    if (!schema.is_object() || depth > kMostReferences) return std::nullopt;
    std::optional<int> all;
    const auto both = [&](std::optional<int> more) {
      if (more) all = all.value_or(kAnyType) & *more;
    };
    if (const OrderedJson* other = target(schema)) both(argument(*other, key, depth + 1));
    if (const auto properties = schema.find("properties");
        properties != schema.end() && properties->is_object())
      if (const auto found = properties->find(key); found != properties->end()) both(types(*found, depth));
    for_each(schema, "allOf", [&](const OrderedJson& each) { both(argument(each, key, depth + 1)); });
    for (const char* name : {"anyOf", "oneOf"}) {
      std::optional<int> any;
      for_each(schema, name, [&](const OrderedJson& each) {
        if (const auto more = argument(each, key, depth + 1)) any = any.value_or(0) | *more;
      });
      both(any);
    }
    if (const auto rest = schema.find("additionalProperties"); !all && rest != schema.end())
      both(types(*rest, depth));
    return all;
  }

  const OrderedJson& root_;
};

}  // namespace

AllowedTypes argument_types(const OrderedJson& tools, const std::string& name, const std::string& key) {
  if (!tools.is_array()) return {};
  for (const OrderedJson& tool : tools) {
    if (!tool.is_object()) continue;
    const OrderedJson& function = tool.contains("function") ? tool["function"] : tool;
    if (!function.is_object() || function.value("name", OrderedJson()) != name) continue;
    const auto parameters = function.find("parameters");
    if (parameters == function.end()) return {};
    const int types = ArgumentTypes(*parameters).argument(key).value_or(kAnyType);
    return {.any = types == kAnyType, .string = (types & kString) != 0, .null = (types & kNull) != 0};
  }
  return {};
}

}  // namespace bough
