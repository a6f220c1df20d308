// A run's folder (docs/formats.md) and what starting again in it means.
//
// Begin afresh: there is no complete checkpoint. Whatever an earlier, killed process left is removed.
// Resume: what was written after the last complete checkpoint is cut off (metrics, rollouts; TensorBoard is
// told to forget it), because it will be written again.
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

// UserError that lists every setting that differs from the saved ones and may not (is_harmless_change), with
// both values and the remedy. Returns the harmless ones that differ.
std::vector<SettingDifference> check_resumed_settings(const RunSettings& saved, const RunSettings& now,
                                                      const std::filesystem::path& config_file);

// How a run's cores are shared, changed while it runs: written by `bough threads` into the run's folder, read
// by the run. 0: as it is.
struct ThreadChange {
  int64_t generating = 0, training = 0;
  bool operator==(const ThreadChange&) const = default;
};
void write_thread_change(const std::filesystem::path& folder, const ThreadChange& change);
ThreadChange read_thread_change(const std::filesystem::path& folder);  // none, or a damaged file: zeros

class RunFolder {
 public:
  // Makes the folder, locks it (UserError where another process holds it), finds the last checkpoint, checks
  // the settings against those saved, cuts off what came after it, and saves the settings. Opens log.txt.
  explicit RunFolder(const RunSettings& settings);
  ~RunFolder();  // closes log.txt

  const std::filesystem::path& path() const { return path_; }
  const std::optional<RunCheckpoint>& checkpoint() const { return checkpoint_; }

  std::filesystem::path rollout_file(int64_t step) const;
  std::vector<int64_t> steps_with_rollouts() const;  // ascending

  // metrics.jsonl and TensorBoard events.
  std::unique_ptr<Metrics> open_metrics() const;

  // report.html: the curves, the trees and samples of the first and the last batch that rollouts/ has.
  static std::filesystem::path write_report(const std::filesystem::path& folder);

 private:
  void cut_after(int64_t step);

  std::filesystem::path path_;
  std::optional<FolderLock> lock_;
  std::optional<RunCheckpoint> checkpoint_;
};

}  // namespace bough
