// Checkpoints of a run in progress: the order of problems, when a checkpoint is due, how it is written and
// how a run continues from one.
#pragma once

#include <atomic>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/mutex.h"
#include "control/worker_parts.h"
#include "data/problems.h"
#include "run/run_components.h"
#include "run/run_folder.h"
#include "run/run_settings.h"
#include "train/trainer.h"

namespace bough {

// The problems in the order of training. The order is part of a checkpoint.
class RunTasks final : public TaskList {
 public:
  // `problems` must outlive this object.
  RunTasks(const Dataset& problems, const RunSettings& settings);

  GroupTask task(uint64_t id) override;
  Json save(const ControllerState& state);
  ControllerState restore(const Json& saved);  // throws as controller_state_from_json() does

 private:
  const Dataset& problems_;
  Mutex mutex_;
  ProblemOrder order_ GUARDED_BY(mutex_);  // caches the last requested epoch
};

// When a checkpoint is due: every freq_steps steps, and freq_minutes after the last one.
class CheckpointSchedule {
 public:
  CheckpointSchedule(const CheckpointSettings& settings, const Clock& clock)
      : settings_(settings), clock_(clock), last_(clock.now()) {}

  bool is_due(int64_t step) const;
  void has_written() { last_ = clock_.now(); }  // callable from any thread

 private:
  const CheckpointSettings settings_;
  const Clock& clock_;
  std::atomic<Clock::Time> last_;
};

class RunCheckpoints final : public CheckpointWriter {
 public:
  // All references must outlive this object. num_ranks: processes of the run.
  RunCheckpoints(RunComponents& parts, RunTasks& tasks, CheckpointSchedule& schedule, int64_t num_ranks);

  // Restores the trainer from the folder's last checkpoint, and returns the controller's state. nullopt: the
  // folder has no checkpoint. Throws UserError if the data sets are not those of the checkpoint.
  std::optional<ControllerState> resume();
  void take_snapshot() override;
  void write(const ControllerState& state, bool copied) override;
  std::string why_not_at(int64_t step) const override { return trainer_.why_not_at(step); }

 private:
  const RunSettings& settings_;
  const RunFolder& folder_;
  Trainer& trainer_;
  const Dataset& valid_;
  RunTasks& tasks_;
  CheckpointSchedule& schedule_;
  const int64_t total_steps_, num_ranks_, num_threads_;
  TrainingSnapshot snapshot_;  // the source of a checkpoint while training continues
};

}  // namespace bough
