// Reads keys of one JSON object in a config.json, with checks. If a check fails, a UserError names the file,
// the key, the value and what was expected. null counts as absent, because transformers writes None as null.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/json.h"

namespace bough {

// The bound of layer counts and of keys that count layers, far above any model. Beyond it a file is damaged.
inline constexpr int64_t kMaxLayers = 10'000;

class ConfigKeys {
 public:
  // `object` must outlive this ConfigKeys.
  ConfigKeys(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  static std::string shown(const Json& value) {
    return value.is_null() ? "nothing" : quoted(dump_line(value));
  }

  const Json& get(const char* key) const {
    static const Json null;
    const auto it = object_.find(key);
    return it == object_.end() ? null : *it;
  }
  bool has(const char* key) const { return !get(key).is_null(); }

  [[noreturn]] void fail(const std::string& key, const std::string& got, const std::string& expected) const {
    throw UserError(str(where_, ", key ", quoted(key), ": got ", got, "; expected ", expected));
  }
  // Throws UserError for a setting that would change the result, but is not implemented.
  [[noreturn]] void refuse(const std::string& key, const std::string& what) const {
    throw UserError(str(where_, ", key ", quoted(key), ": ", what,
                        " is not supported; use a model without it (a wrong result is never computed)"));
  }

  int64_t integer(const char* key, int64_t high, const int64_t* fallback = nullptr) const {
    if (!has(key) && fallback) return *fallback;
    const Json& value = get(key);
    const std::string expected = str("an integer from 1 to ", high);
    if (!value.is_number_integer()) fail(key, shown(value), expected);
    if (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t(high))
      fail(key, shown(value), expected);
    if (value.get<int64_t>() < 1 || value.get<int64_t>() > high) fail(key, shown(value), expected);
    return value.get<int64_t>();
  }
  int64_t integer_or(const char* key, int64_t high, int64_t fallback) const {
    return integer(key, high, &fallback);
  }

  double positive(const char* key, double high, const double* fallback = nullptr) const {
    if (!has(key) && fallback) return *fallback;
    const Json& value = get(key);
    const double number = value.is_number() ? value.get<double>() : -1;
    if (!(number > 0 && number <= high)) fail(key, shown(value), str("a number above 0, at most ", high));
    return number;
  }
  double positive_or(const char* key, double high, double fallback) const {
    return positive(key, high, &fallback);
  }
  std::vector<double> positives(const char* key, int64_t count) const {
    const Json& value = get(key);
    const std::string expected = str("a list of ", count, " numbers above 0");
    if (!value.is_array() || int64_t(value.size()) != count) fail(key, shown(value), expected);
    std::vector<double> numbers;
    for (const Json& item : value) {
      numbers.push_back(item.is_number() ? item.get<double>() : -1);
      if (!(numbers.back() > 0)) fail(key, shown(value), expected);
    }
    return numbers;
  }
  bool flag_or(const char* key, bool fallback) const {
    if (!has(key)) return fallback;
    if (!get(key).is_boolean()) fail(key, shown(get(key)), "true or false");
    return get(key).get<bool>();
  }
  std::string text_or(const char* key, const char* fallback) const {
    if (!has(key)) return fallback;
    if (!get(key).is_string()) fail(key, shown(get(key)), "a string");
    return get(key).get<std::string>();
  }
  const Json& object() const { return object_; }
  const std::string& where() const { return where_; }

 private:
  const Json& object_;
  std::string where_;
};

}  // namespace bough
