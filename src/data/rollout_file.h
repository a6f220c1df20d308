// Rollout files: JSON Lines with one sequence per line (`.jsonl`, or compressed as `.jsonl.zst`).
// docs/formats.md lists the fields. Unknown fields are kept.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "data/trajectory.h"

namespace bough {

struct RolloutReadOptions {
  int64_t vocab_size = 0;                   // a token id must be below it; 0: not checked
  bool require_reward_or_advantage = true;  // not for lines with valid = false
  bool allow_greedy = false;                // temperature 0: samples of an evaluation, not to be trained on
  // Names of fields that become Trajectory::columns. `bough rollout` writes the two defaults. All other
  // unknown fields go to Trajectory::fields.
  std::vector<std::string> columns = {"raw_logprobs", "truncated_logprobs"};
};

// Throws UserError if a line is malformed, or if the lines of a file have different temperatures. The message
// names the file, the line number, the field and, in a list, the position.
std::vector<Trajectory> read_rollouts(const std::filesystem::path& path,
                                      const RolloutReadOptions& options = {});

// Writes a temporary file and renames it. Compresses if the name ends in `.zst`, each group (consecutive rows
// of one group) as a zstd frame of its own. Throws IoError if the disk is full; an existing file then stays
// unchanged.
void write_rollouts(const std::filesystem::path& path, const std::vector<Trajectory>& rollouts);

// The rows as a zstd frame. A file of such frames, one appended after the other, is a rollout file.
std::string rollouts_frame(std::span<const Trajectory> rollouts);

// The groups of a compressed rollout file, each of which is decompressed when it is read. A file of one frame
// is read whole, because its frame may have several groups. An incomplete frame at the file's end is left
// out: another process may be appending it. Throws UserError as read_rollouts().
class RolloutGroups {
 public:
  explicit RolloutGroups(const std::filesystem::path& path, RolloutReadOptions options = {});
  size_t size() const { return frames_.empty() ? groups_.size() : frames_.size(); }
  std::vector<Trajectory> read(size_t i) const;

 private:
  std::filesystem::path path_;
  RolloutReadOptions options_;
  MappedFile file_;
  std::vector<std::span<const std::byte>> frames_;
  std::vector<std::vector<Trajectory>> groups_;  // only if the file has one frame
};

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
