// Rollouts: what was sampled, as JSON Lines, one sequence a line (`.jsonl`, or `.jsonl.zst`).
// The fields are those of the format's table in docs/formats.md; unknown fields are kept.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"

namespace bough {

struct Rollout {
  std::string group;               // sequences of one prompt share it
  std::vector<int32_t> input_ids;  // prompt and response; may be empty
  std::vector<uint8_t> loss_mask;  // 1: the policy produced this token and is trained on it
  std::vector<float> logprobs;     // under the sampling policy at `temperature`; 0 where the mask is 0
  std::vector<int32_t> versions;   // empty, or the weight version of each token; -1 where the mask is 0
  double temperature = 1.0;
  std::optional<double> reward;
  std::vector<float> advantage;  // empty; one value for the sequence; or one a token
  Json extra;                    // unknown fields, kept as an object

  // Position 0 has no prediction: its mask is ignored and not counted.
  bool trained(size_t position) const { return position > 0 && loss_mask[position] != 0; }
};

struct RolloutReadOptions {
  int64_t vocab_size = 0;  // ids must be below it; 0: not checked
  bool require_reward_or_advantage = true;
};

// UserError names the file, the line number, the field and, in a list, the position. One temperature a file.
std::vector<Rollout> read_rollouts(const std::filesystem::path& path, const RolloutReadOptions& options = {});

// Writes aside and renames; `.zst` compresses. IoError on a full disk leaves what was there.
void write_rollouts(const std::filesystem::path& path, const std::vector<Rollout>& rollouts);

Json rollout_to_json(const Rollout& rollout);
Rollout parse_rollout(const Json& line, const std::string& where, const RolloutReadOptions& options = {});

}  // namespace bough
