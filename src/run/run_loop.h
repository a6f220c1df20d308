// The loop of a run on rank 0: the controller and its workers, connected by the run's settings. Models, files
// and ranks are behind the interfaces of WorkerParts, so tests run the loop with fakes.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "control/controller.h"
#include "control/workers.h"
#include "data/problems.h"
#include "run/run_checkpoints.h"
#include "run/run_commands.h"
#include "run/run_components.h"
#include "run/run_folder.h"
#include "run/run_reporting.h"
#include "run/run_settings.h"

namespace bough {

struct RunLoopOptions {
  int64_t total_steps = 1;
  int64_t num_problems = 0;  // of the training data
  int64_t num_engines = 1;
  ThreadSplit threads;
  std::function<bool()> stop;  // returns true to stop: a checkpoint is written, then run() returns
};

WorkerOptions worker_options(const RunSettings& settings, const ThreadSplit& threads);
ControllerOptions controller_options(const RunSettings& settings, const RunLoopOptions& options);

class RunLoop final : private Evaluator, private ControllerPolicy, private ControllerObserver {
 public:
  // All references, and what `parts` points to, must outlive this object. parts.evaluator is replaced: this
  // object evaluates on `valid`. If `valid` is empty, no evaluation is due.
  RunLoop(const RunSettings& settings, const WorkerParts& parts, const Dataset& valid,
          const CheckpointSchedule& schedule, const RunFolder& folder, RunReporting& reporting,
          RunLoopOptions options);

  // Continues from a checkpoint. Call it before run().
  void restore(ControllerState state) { controller_.restore(std::move(state)); }
  // Returns false if the run was stopped before its end. Throws as Controller::on() does. After a StallError
  // a thread may hang, so this object must not be destroyed.
  bool run();
  int64_t num_steps() const { return controller_.num_steps(); }
  // After run() threw an exception other than StallError: ends the threads, and writes a checkpoint of the
  // last trained step if that step has none and its weights are still there, or can be read from a snapshot.
  // The log says from which step the run continues. Throws nothing, because the exception of run() counts.
  void save_last_step();

 private:
  // Evaluator. Runs on the engine's thread.
  std::optional<MetricValues> evaluate(const std::function<bool()>& stop) override;
  // Evaluates the policy from which the engine samples. Returns its metrics with the prefix `name`.
  std::optional<MetricValues> evaluate_policy(const std::string& name, const std::function<bool()>& stop);
  // ControllerPolicy.
  bool evaluation_due(int64_t step, bool is_last) override;
  bool checkpoint_due(int64_t step) override { return schedule_.is_due(step); }
  std::optional<std::string> why_refused(const ScoredGroup& group) override;
  // ControllerObserver.
  void on_group(const ScoredGroup& group, int64_t step, const std::string& reason) override {
    reporting_.add_group(group, step, reason);
  }
  void on_state(int64_t step) override { reporting_.bind_dropped(step); }
  void on_batch(const StepRecord& record) override { reporting_.write_batch(record); }
  void on_record(int64_t step, const MetricValues& values) override;

  void follow_thread_change();
  void take_last_events();
  bool stopping() const { return commands_.stops() || (options_.stop && options_.stop()); }
  WorkerParts with_evaluator(WorkerParts parts) {
    parts.evaluator = this;
    return parts;
  }

  const RunSettings& settings_;
  const WorkerParts parts_;
  const Dataset& valid_;
  const CheckpointSchedule& schedule_;
  const RunFolder& folder_;
  RunReporting& reporting_;
  const RunLoopOptions options_;
  ThreadChange thread_change_;
  RunCommands commands_;
  RunWorkers workers_;  // its threads use the members above
  Controller controller_;
};

}  // namespace bough
