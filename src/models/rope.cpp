#include "models/rope.h"

#include <cmath>
#include <set>

#include "models/config_keys.h"

namespace bough {

namespace {

constexpr double kMaxTheta = 1e30, kMaxFactor = 1e9;
constexpr int64_t kMaxRopePositions = int64_t{1} << 31;

struct KnownType {
  const char* name;
  RopeType type;
  std::set<std::string> keys;  // in addition to the common keys
};
const std::vector<KnownType> kTypes = {
    {"default", RopeType::kDefault, {"original_max_position_embeddings"}},
    {"linear", RopeType::kLinear, {"factor"}},
    {"dynamic", RopeType::kDynamic, {"factor", "original_max_position_embeddings"}},
    {"llama3",
     RopeType::kLlama3,
     {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}},
    {"yarn",
     RopeType::kYarn,
     {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
      "original_max_position_embeddings"}},
    {"longrope",
     RopeType::kLongrope,
     {"factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings"}},
};

const KnownType& read_type(const ConfigKeys& keys, const RopeContext& context) {
  const char* key = keys.has("rope_type") ? "rope_type" : "type";
  std::string name = keys.text_or(key, "default");
  if (context.yarn_is_longrope && (name == "su" || name == "yarn")) name = "longrope";
  for (const KnownType& known : kTypes)
    if (name == known.name) return known;
  keys.refuse(key, str("rope scaling of type ", quoted(name)));
}

void refuse_unknown_keys(const ConfigKeys& keys, const KnownType& type) {
  static const std::set<std::string> common = {"rope_type", "type", "rope_theta", "partial_rotary_factor"};
  for (const auto& [name, value] : keys.object().items())
    if (!value.is_null() && !common.contains(name) && !type.keys.contains(name))
      keys.refuse(name, str("this rope parameter (", ConfigKeys::shown(value), ") with rope_type ",
                            quoted(std::string_view(type.name))));
}

// Returns YaRN's attention scale, as a factor on cos and sin.
double yarn_scale(double factor, double mscale) {
  return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

double yarn_attention_factor(const ConfigKeys& keys, double factor) {
  const double mscale = keys.positive_or("mscale", kMaxFactor, 1);
  const double all = keys.positive_or("mscale_all_dim", kMaxFactor, 1);
  const bool both = keys.has("mscale") && keys.has("mscale_all_dim");
  const double inferred = both ? yarn_scale(factor, mscale) / yarn_scale(factor, all) : yarn_scale(factor, 1);
  return keys.positive_or("attention_factor", kMaxFactor, inferred);
}

double longrope_attention_factor(const ConfigKeys& keys, double factor, int64_t original) {
  const double inferred =
      factor <= 1 ? 1 : std::sqrt(1 + std::log(factor) / std::log(static_cast<double>(original)));
  return keys.positive_or("attention_factor", kMaxFactor, inferred);
}

}  // namespace

Rope read_rope(const ConfigKeys& keys, const RopeContext& context) {
  const KnownType& type = read_type(keys, context);
  refuse_unknown_keys(keys, type);
  Rope rope;
  rope.type = type.type;
  rope.source = keys.object();
  rope.theta = keys.positive_or("rope_theta", kMaxTheta, context.default_theta);
  if (rope.type == RopeType::kDefault) return rope;
  // As in transformers, original_max_position_embeddings beside rope_parameters takes precedence over the key
  // inside.
  rope.original_positions =
      context.original_positions
          ? context.original_positions
          : keys.integer_or("original_max_position_embeddings", kMaxRopePositions, context.max_positions);
  const double ratio =
      static_cast<double>(context.max_positions) / static_cast<double>(rope.original_positions);
  const bool has_ratio = rope.type == RopeType::kYarn || rope.type == RopeType::kLongrope;
  rope.factor = keys.positive("factor", kMaxFactor, has_ratio ? &ratio : nullptr);
  switch (rope.type) {
    case RopeType::kDefault:
    case RopeType::kLinear: break;
    case RopeType::kDynamic: rope.max_exact_length = context.max_positions; break;
    case RopeType::kLlama3:
      rope.low_freq_factor = keys.positive("low_freq_factor", kMaxFactor);
      rope.high_freq_factor = keys.positive("high_freq_factor", kMaxFactor);
      if (rope.high_freq_factor <= rope.low_freq_factor)
        keys.fail("high_freq_factor", ConfigKeys::shown(keys.get("high_freq_factor")),
                  "a number above low_freq_factor");
      break;
    case RopeType::kYarn:
      rope.beta_fast = keys.positive_or("beta_fast", kMaxFactor, 32);
      rope.beta_slow = keys.positive_or("beta_slow", kMaxFactor, 1);
      rope.truncate = keys.flag_or("truncate", true);
      rope.attention_factor = yarn_attention_factor(keys, rope.factor);
      break;
    case RopeType::kLongrope:
      rope.short_factor = keys.positives("short_factor", context.rotary_dim / 2);
      keys.positives("long_factor", context.rotary_dim / 2);
      if (rope.original_positions < 2)
        keys.fail("original_max_position_embeddings", str(rope.original_positions), "2 or more");
      rope.attention_factor = longrope_attention_factor(keys, rope.factor, rope.original_positions);
      rope.max_exact_length = rope.original_positions;
  }
  return rope;
}

Json write_rope(const Rope& rope) {
  Json json = rope.source.is_object() ? rope.source : Json::object();
  if (!json.contains("rope_type") && !json.contains("type")) json["rope_type"] = "default";
  json["rope_theta"] = rope.theta;
  return json;
}

}  // namespace bough
