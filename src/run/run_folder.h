// A run's folder (docs/formats.md), and what a start does with an existing folder.
//
// - New run, if there is no complete checkpoint: files of an earlier, killed process are removed.
// - Resume: metrics and rollouts written after the last complete checkpoint are removed, because they will be
//   written again. TensorBoard is told to forget them.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "base/file.h"
#include "data/rollout_file.h"
#include "report/display.h"
#include "report/metrics.h"
#include "run/run_settings.h"
#include "train/run_checkpoint.h"

namespace bough {

std::filesystem::path run_folder_of(
    const RunSettings& settings);  // <fileroot>/<experiment_name>/<trial_name>

// Returns the differences that are harmless: is_harmless_change, the setting has no effect in either run
// (idle_settings), or `auto` selects the other value of tool_call_parser. Throws UserError if there are other
// differences. The message lists them with both values and the remedy.
std::vector<SettingDifference> check_resumed_settings(const RunSettings& saved, const RunSettings& now,
                                                      const std::filesystem::path& config_file);

// New thread counts for a run in progress. `bough threads` writes them into the run's folder, and the run
// reads them. 0: unchanged.
struct ThreadChange {
  int64_t generating = 0, training = 0;
  bool operator==(const ThreadChange&) const = default;
};
void write_thread_change(const std::filesystem::path& folder, const ThreadChange& change);
ThreadChange read_thread_change(const std::filesystem::path& folder);  // zeros if missing or damaged

class RunFolder {
 public:
  // Makes and locks the folder, and finds the last checkpoint. Checks the settings against the saved ones and
  // saves them. Removes metrics and rollouts after the checkpoint. Opens log.txt. Throws UserError if another
  // process holds the lock, or as check_resumed_settings() does.
  explicit RunFolder(const RunSettings& settings);
  ~RunFolder();  // closes log.txt

  const std::filesystem::path& path() const { return path_; }
  const std::optional<RunCheckpoint>& checkpoint() const { return checkpoint_; }

  std::filesystem::path rollout_file(int64_t step) const;
  std::vector<int64_t> steps_with_rollouts() const;  // ascending

  // Opens metrics.jsonl and the TensorBoard events.
  std::unique_ptr<Metrics> open_metrics() const;

  // Writes report.html (run_view.h) and returns its path.
  static std::filesystem::path write_report(const std::filesystem::path& folder);

 private:
  void cut_after(int64_t step);

  std::filesystem::path path_;
  std::optional<FolderLock> lock_;
  std::optional<RunCheckpoint> checkpoint_;
};

}  // namespace bough
