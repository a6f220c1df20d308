#include "cost/device_profile.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace bough {

double CostCurve::clamped(int64_t size) const {
  BOUGH_CHECK(!sizes.empty() && sizes.size() == values.size(), "a curve of ", sizes.size(), " sizes and ",
              values.size(), " values");
  const auto above = std::lower_bound(sizes.begin(), sizes.end(), size) - sizes.begin();
  if (above == 0) return values.front();
  if (above == static_cast<int64_t>(sizes.size())) return values.back();
  const double share =
      static_cast<double>(size - sizes[above - 1]) / static_cast<double>(sizes[above] - sizes[above - 1]);
  return values[above - 1] + share * (values[above] - values[above - 1]);
}

double CostCurve::at(int64_t size) const {
  const double value = clamped(size);
  return size <= sizes.back() ? value : value * static_cast<double>(size) / static_cast<double>(sizes.back());
}

double DeviceProfile::matrix_product_rate() const {
  double rate = 0;
  for (size_t i = 0; i < linear_forward.sizes.size(); ++i)
    if (linear_forward.values[i] > 0)
      rate = std::max(rate, static_cast<double>(linear_forward.sizes[i]) / linear_forward.values[i]);
  return rate;
}

namespace {

constexpr const char* kAttentionNames[] = {"tiles", "bf16_tiles", "reference", "fused"};

// Every member under its key, for writing, reading and checking alike.
template <class Profile, class Visitor>
void visit(Profile& p, Visitor&& v) {
  v("name", p.name);
  v("source", p.source);
  v("dtype", p.dtype);
  v("memory_bytes", p.memory_bytes);
  v("threads", p.threads);
  v("attention", p.attention);
  v("packs_factors", p.packs_factors);
  v("launches_overlap", p.launches_overlap);
  v("linear_forward", p.linear_forward);
  v("linear_backward", p.linear_backward);
  v("elementwise_forward", p.elementwise_forward);
  v("elementwise_backward", p.elementwise_backward);
  v("attention_forward", p.attention_forward);
  v("attention_backward", p.attention_backward);
  v("head_forward", p.head_forward);
  v("head_backward", p.head_backward);
  v("seconds_per_layer_forward", p.seconds_per_layer_forward);
  v("seconds_per_layer_backward", p.seconds_per_layer_backward);
  v("seconds_per_pass_forward", p.seconds_per_pass_forward);
  v("seconds_per_pass_backward", p.seconds_per_pass_backward);
}

template <class Cost, class Visitor>
void visit_attention(Cost& cost, Visitor&& v) {
  v("by_queries", cost.by_queries);
  v("score_flops", cost.score_flops);
  v("overhead_keys", cost.overhead_keys);
}

struct Writer {
  Json& json;
  template <class T>
  void operator()(const char* key, const T& value) const {
    json[key] = value;
  }
  void operator()(const char* key, DeviceProfile::Attention value) const {
    json[key] = kAttentionNames[static_cast<int>(value)];
  }
  void operator()(const char* key, const CostCurve& curve) const {
    json[key] = {{"sizes", curve.sizes}, {"values", curve.values}};
  }
  void operator()(const char* key, const AttentionCost& cost) const {
    json[key] = Json::object();
    visit_attention(cost, Writer{json[key]});
  }
};

class Reader {
 public:
  Reader(const Json& json, std::string where) : json_(json), where_(std::move(where)) {
    if (!json.is_object()) throw UserError(str(where_, ": got ", json.type_name(), ", expected an object"));
  }

  void operator()(const char* key, std::string& value) const {
    value = find(key, &Json::is_string, "text").get<std::string>();
  }
  void operator()(const char* key, bool& value) const {
    value = find(key, &Json::is_boolean, "true or false").get<bool>();
  }
  void operator()(const char* key, int64_t& value) const {
    value = find(key, &Json::is_number_integer, "a whole number").get<int64_t>();
    require(value >= 0, key, "a whole number from 0 up");
  }
  void operator()(const char* key, double& value) const {
    value = find(key, &Json::is_number, "a number").get<double>();
    require(value >= 0, key, "a number from 0 up");
  }
  void operator()(const char* key, DeviceProfile::Attention& value) const {
    auto name = find(key, &Json::is_string, "text").get<std::string>();
    if (name == "amx_tiles") name = "bf16_tiles";  // as runs before 2026-11-22 saved it
    const auto* found = std::find(std::begin(kAttentionNames), std::end(kAttentionNames), name);
    require(found != std::end(kAttentionNames), key, "tiles, bf16_tiles, reference or fused");
    value = static_cast<DeviceProfile::Attention>(found - std::begin(kAttentionNames));
  }
  void operator()(const char* key, CostCurve& curve) const {
    const Reader in(find(key, &Json::is_object, "an object"), str(where_, ": ", key));
    curve = {};
    for (const auto& size : in.find("sizes", &Json::is_array, "a list")) {
      in.require(size.is_number_integer() && size.get<int64_t>() > 0 &&
                     (curve.sizes.empty() || size.get<int64_t>() > curve.sizes.back()),
                 "sizes", "whole numbers above 0, ascending");
      curve.sizes.push_back(size.get<int64_t>());
    }
    for (const auto& value : in.find("values", &Json::is_array, "a list")) {
      in.require(value.is_number() && value.get<double>() >= 0, "values", "numbers from 0 up");
      curve.values.push_back(value.get<double>());
    }
    in.require(!curve.sizes.empty() && curve.sizes.size() == curve.values.size(), "values",
               "as many as sizes, and at least one");
  }
  void operator()(const char* key, AttentionCost& cost) const {
    visit_attention(cost, Reader(find(key, &Json::is_object, "an object"), str(where_, ": ", key)));
  }

 private:
  const Json& find(const char* key, bool (Json::*is)() const noexcept, const char* expected) const {
    const auto found = json_.find(key);
    if (found == json_.end()) throw UserError(str(where_, ": ", key, " is missing, expected ", expected));
    require(((*found).*is)(), key, expected);
    return *found;
  }
  void require(bool holds, const char* key, const char* expected) const {
    if (!holds)
      throw UserError(
          str(where_, ": ", key, ": got ", quoted(dump_line(json_.at(key)), 60), ", expected ", expected));
  }

  const Json& json_;
  std::string where_;
};

// What from_json refuses, of a profile that was put together by hand.
struct Checker {
  void operator()(const char*, const std::string&) const {}
  void operator()(const char*, bool) const {}
  void operator()(const char*, DeviceProfile::Attention) const {}
  void operator()(const char* key, int64_t value) const {
    BOUGH_CHECK(value >= 0, "device profile: ", key, " = ", value);
  }
  void operator()(const char* key, double value) const {
    BOUGH_CHECK(value >= 0 && std::isfinite(value), "device profile: ", key, " = ", value);
  }
  void operator()(const char* key, const CostCurve& curve) const {
    BOUGH_CHECK(!curve.sizes.empty() && curve.sizes.size() == curve.values.size() && curve.sizes[0] > 0 &&
                    std::is_sorted(curve.sizes.begin(), curve.sizes.end(), std::less_equal<>()),
                "device profile: ", key, " has ", curve.sizes.size(), " sizes, or out of order");
    for (const double value : curve.values) (*this)(key, value);
  }
  void operator()(const char*, const AttentionCost& cost) const { visit_attention(cost, *this); }
};

}  // namespace

void DeviceProfile::check_integrity() const {
  visit(*this, Checker{});
}

Json DeviceProfile::to_json() const {
  Json json = Json::object();
  visit(*this, Writer{json});
  return json;
}

DeviceProfile DeviceProfile::from_json(const Json& json, const std::string& where) {
  DeviceProfile profile;
  visit(profile, Reader(json, where));
  return profile;
}

}  // namespace bough
