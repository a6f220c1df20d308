// Which angles a model's rotary embedding has: plain, or stretched to longer sequences as transformers 5.17's
// modeling_rope_utils does it. The frequencies themselves: rope_frequencies in models/decoder.h. No torch.
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
  double factor = 1;                                 // by which positions are stretched
  int64_t original_positions = 0;                    // llama3, yarn, longrope: the length before that
  double low_freq_factor = 1, high_freq_factor = 4;  // llama3
  double beta_fast = 32, beta_slow = 1;              // yarn, in turns over the original length
  bool truncate = true;                              // yarn: those bounds at whole elements
  std::vector<double> short_factor;                  // longrope: each frequency's, up to the original length
  double attention_factor = 1;                       // yarn, longrope: cos and sin are multiplied by it
  // dynamic, longrope: the longest sequence whose angles do not depend on its length. A prefix that sequences
  // of several lengths share has no angles beyond.
  int64_t max_exact_length = std::numeric_limits<int64_t>::max();
  Json source;  // the rope_parameters, as read; empty where there were none
};

// What a model's rope depends on beside its parameters.
struct RopeContext {
  double default_theta;
  int64_t rotary_dim;          // elements of a head that are turned
  int64_t max_positions;       // max_position_embeddings
  int64_t original_positions;  // original_max_position_embeddings beside rope_parameters, or 0
  bool yarn_is_longrope;       // Phi-3's classes take "su" and "yarn" as longrope
};

// Reads one object of rope parameters (empty: the default). UserError names an unknown type or key.
Rope read_rope(const ConfigKeys& keys, const RopeContext& context);

// Writes the object that read_rope reads.
Json write_rope(const Rope& rope);

}  // namespace bough
