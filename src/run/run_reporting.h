// The reports of a run: metrics, the timeline and the rollouts in its folder, the live display, and the
// summary at the end.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/file.h"
#include "base/mutex.h"
#include "control/controller.h"
#include "report/display.h"
#include "report/metrics.h"
#include "report/progress_file.h"
#include "report/timeline.h"
#include "run/run.h"
#include "run/run_components.h"
#include "run/run_folder.h"
#include "run/trace_store.h"

namespace bough {

class RunReporting {
 public:
  // `folder` and `clock` must outlive this object.
  RunReporting(const RunSettings& settings, const RunFolder& folder, const Clock& clock, int64_t total_steps,
               DisplayStyle style);

  // Opens the files, and reads what earlier processes of the run wrote. Call it once, before the functions
  // that write. By then a resumed run must have cut its metrics.
  void open();
  bool is_evaluated_at_start() const { return is_evaluated_at_start_; }  // by an earlier process

  // For ControllerObserver: the samples of the run (trace_store.h), if it keeps them.
  void add_group(const ScoredGroup& group, int64_t step, const std::string& reason) {
    if (traces_) traces_->add_group(group, step, reason);
  }
  void bind_dropped(int64_t step) {
    if (traces_) traces_->bind_dropped(step);
  }
  void write_batch(const StepRecord& record) {
    if (traces_) traces_->end_step(record);
  }
  void write_record(int64_t step, const MetricValues& values);
  void write_timeline(Timeline& timeline, bool all);
  // `num_done` problems of the current evaluation; 0: no evaluation. Callable from any thread.
  void set_evaluated(int64_t num_done) { evaluated_.store(num_done); }
  // Samples of an evaluation whose metrics have the prefix `name`. They are stored with the record that has
  // these metrics. Callable from any thread.
  void keep_evaluated(std::vector<Trajectory> samples, const std::string& name);
  // Shows the activity, and the progress of an evaluation. num_valid: problems of an evaluation.
  void show(const std::string& activity, int64_t num_valid);
  // Writes the numbers of groups, and what each thread does, to progress.json.
  void show_queue(const Controller::Counts& counts, const std::map<std::string, int64_t>& dropped);
  void show_threads(const std::vector<std::pair<std::string, std::string>>& doing) {
    progress_->set_threads(doing);
  }
  // Says in progress.json how the run ended: finished, stopped or failed.
  void end(const std::string& state, const std::string& error = "");
  LiveDisplay& display() { return display_; }

 private:
  const RunFolder& folder_;
  const Clock& clock_;
  const int64_t total_steps_;
  const std::optional<int64_t> most_rollout_bytes_;  // nullopt: the run keeps none
  LiveDisplay display_;
  std::unique_ptr<ProgressFile> progress_;  // nullptr before open()
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<TraceWriter> traces_;  // nullptr: the run keeps none
  std::unique_ptr<AppendFile> timeline_file_;
  double timeline_begin_ = 0;  // seconds of earlier processes of this run
  bool is_evaluated_at_start_ = false;
  std::atomic<int64_t> evaluated_ = 0;
  Mutex mutex_;
  std::map<std::string, std::vector<Trajectory>> evaluated_samples_ GUARDED_BY(mutex_);  // by the prefix
};

// Times gradients of the last batches, alternately with and without the prefix tree. nullopt if the settings
// ask for no comparison, no rollouts were kept, layers are sharded, or `stop` returned true.
std::optional<Comparison> compare_with_dense(RunComponents& parts, LiveDisplay& display,
                                             const std::function<bool()>& stop);

// Summarises the run from its files, and writes report.html.
RunSummary summarise(const RunSettings& settings, const RunFolder& folder, int64_t num_steps);

}  // namespace bough
