// One sampled sequence with all that training and reports know of it: the only form that a rollout has between an
// engine and the executor. Rollout files (rollout_file.h) are these, a line each.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"

namespace bough {

struct Trajectory {
  std::string group;               // sequences of one prompt share it
  std::vector<int32_t> input_ids;  // prompt and response; may be empty
  std::vector<uint8_t> loss_mask;  // 1: the policy produced this token and is trained on it
  std::vector<float> logprobs;     // under the sampling policy at `temperature`; 0 where the mask is 0
  std::vector<int32_t> versions;   // empty, or the weight version of each token; -1 where the mask is 0
  double temperature = 1.0;
  std::optional<double> reward;
  std::vector<float> advantage;  // empty; one value for the sequence; or one a token
  bool trained = true;           // false: a filter left it out; it takes part in no loss
  Json fields = Json::object();  // a file's other fields, kept

  // Position 0 has no prediction: its mask is ignored and not counted.
  bool trains(size_t position) const { return position > 0 && loss_mask[position] != 0; }
};

}  // namespace bough
