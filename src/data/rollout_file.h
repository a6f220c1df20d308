// Rollout files: JSON Lines with one sequence per line (`.jsonl`, or compressed as `.jsonl.zst`).
// docs/formats.md lists the fields. Unknown fields are kept.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "data/trajectory.h"

namespace bough {

struct RolloutReadOptions {
  int64_t vocab_size = 0;                   // a token id must be below it; 0: not checked
  bool require_reward_or_advantage = true;  // not for lines with valid = false
  // Names of fields that become Trajectory::columns. `bough rollout` writes the two defaults. All other
  // unknown fields go to Trajectory::fields.
  std::vector<std::string> columns = {"raw_logprobs", "truncated_logprobs"};
};

// Throws UserError if a line is malformed, or if the lines of a file have different temperatures. The message
// names the file, the line number, the field and, in a list, the position.
std::vector<Trajectory> read_rollouts(const std::filesystem::path& path,
                                      const RolloutReadOptions& options = {});

// Writes a temporary file and renames it. Compresses if the name ends in `.zst`. Throws IoError if the disk
// is full; an existing file then stays unchanged.
void write_rollouts(const std::filesystem::path& path, const std::vector<Trajectory>& rollouts);

// Parses one line, a JSON object. Throws UserError if the line is malformed. The message begins with `where`
// ("FILE, line 3"), then names the field and, in a list, the position, counted from 0.
Trajectory parse_rollout_line(std::string_view line, const std::string& where,
                              const RolloutReadOptions& options);

// Appends one line to `out`, without its line break. Floats have the fewest digits that read back as the same
// float. Throws if an invariant of Trajectory does not hold (lengths of lists, finite numbers).
void append_rollout_line(std::string& out, const Trajectory& rollout);

Json rollout_to_json(const Trajectory& rollout);
Trajectory parse_rollout(const Json& line, const std::string& where, const RolloutReadOptions& options = {});

// PageChoices as JSON, for messages between processes. Rollout files do not contain them.
Json to_json(const PageChoices& choices);
PageChoices page_choices_from_json(const Json& json);
// RoutedExperts in messages between processes. In rollout files they are nested lists.
Json to_json(const RoutedExperts& routed);
RoutedExperts routed_experts_from_json(const Json& json);

}  // namespace bough
