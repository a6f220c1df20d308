// Rollouts: what was sampled, as JSON Lines, one sequence a line (`.jsonl`, or `.jsonl.zst`).
// The fields are those of the format's table in docs/formats.md; unknown fields are kept.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "data/trajectory.h"

namespace bough {

struct RolloutReadOptions {
  int64_t vocab_size = 0;                   // ids must be below it; 0: not checked
  bool require_reward_or_advantage = true;  // of valid rows
  // Fields that become Trajectory::columns: those that `bough rollout` writes. Other fields stay as they are.
  std::vector<std::string> columns = {"raw_logprobs", "truncated_logprobs"};
};

// UserError names the file, the line number, the field and, in a list, the position. One temperature a file.
std::vector<Trajectory> read_rollouts(const std::filesystem::path& path,
                                      const RolloutReadOptions& options = {});

// Writes aside and renames; `.zst` compresses. IoError on a full disk leaves what was there.
void write_rollouts(const std::filesystem::path& path, const std::vector<Trajectory>& rollouts);

// Reads a line, which is a JSON object. UserErrors begin with `where` ("FILE, line 3"), then name the field
// and the position in its list, counted from 0.
Trajectory parse_rollout_line(std::string_view line, const std::string& where,
                              const RolloutReadOptions& options);

// The line without its end, floats in the fewest digits that read back as the same float. Invariants of
// Trajectory (lengths, finite numbers) are checked.
void append_rollout_line(std::string& out, const Trajectory& rollout);

Json rollout_to_json(const Trajectory& rollout);
Trajectory parse_rollout(const Json& line, const std::string& where, const RolloutReadOptions& options = {});

// What files do not have, for other processes.
Json to_json(const PageChoices& choices);
PageChoices page_choices_from_json(const Json& json);

}  // namespace bough
