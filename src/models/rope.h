// Parameters of a model's rotary embedding: plain, or stretched to longer sequences as in transformers 5.17's
// modeling_rope_utils. rope_frequencies() in models/decoder.h computes the frequencies. No torch.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "base/json.h"

namespace bough {

class ConfigKeys;

enum class RopeType { kDefault, kLinear, kDynamic, kLlama3, kYarn, kLongrope };

struct Rope {
  RopeType type = RopeType::kDefault;
  double theta = 1e4;
  double factor = 1;                                 // positions are stretched by this factor
  int64_t original_positions = 0;                    // llama3, yarn, longrope: length before stretching
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  double beta_fast = 32, beta_slow = 1;              // yarn, in turns over the original length
  bool truncate = true;                              // yarn: beta bounds are rounded to whole elements
  std::vector<double> short_factor;                  // longrope: per frequency, up to original_positions
  double attention_factor = 1;                       // yarn, longrope: cos and sin are multiplied by it
  // dynamic, longrope: the longest sequence whose angles do not depend on its length. Longer sequences cannot
  // share a prefix with sequences of other lengths, because the prefix would have different angles in each.
  int64_t max_exact_length = std::numeric_limits<int64_t>::max();
  Json source;  // the rope_parameters as read; empty if there were none
};

// Values from the rest of config.json that read_rope() needs.
struct RopeContext {
  double default_theta;
  int64_t rotary_dim;          // rotated elements of a head
  int64_t max_positions;       // max_position_embeddings
  int64_t original_positions;  // original_max_position_embeddings beside rope_parameters, or 0
  bool yarn_is_longrope;       // Phi-3's classes take "su" and "yarn" as longrope
};

// Reads one object of rope parameters; an empty object gives the default. Throws UserError if the type or a
// key is unknown, or a value is invalid.
Rope read_rope(const ConfigKeys& keys, const RopeContext& context);

// Writes the object that read_rope reads.
Json write_rope(const Rope& rope);

}  // namespace bough
