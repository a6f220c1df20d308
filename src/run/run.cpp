#include "run/run.h"

#include <ATen/Parallel.h>

#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/log.h"
#include "report/run_control.h"
#include "run/run_checkpoints.h"
#include "run/run_components.h"
#include "run/run_loop.h"
#include "run/run_ranks.h"
#include "run/run_reporting.h"
#include "run/run_view.h"
#include "run/train_batch.h"

namespace bough {

namespace {

class RunTrainer final : public StepTrainer {
 public:
  RunTrainer(RunComponents& parts, RankZero& ranks) : parts_(parts), ranks_(ranks) {}

  StepRecord train(const TrainOrder& order) override {
    StepRecord record = train_batch(order, parts_.settings, parts_.trainer);
    ranks_.add_metrics(record.metrics);
    return record;
  }

 private:
  RunComponents& parts_;
  RankZero& ranks_;
};

// The run of rank 0: components, ranks, files, and the loop that drives them.
class Run {
 public:
  Run(const RunSettings& settings, const RunOptions& options, std::unique_ptr<RankGroups> groups);

  RunSummary work();
  // Call it after work() threw. After that no call waits for other ranks. saves: writes a checkpoint of the
  // last step if that is possible. `error`: its message; empty: the user stopped the run.
  void give_up(bool saves, const std::string& error) {
    reporting_.end(error.empty() ? "stopped" : "failed", error);
    ranks_.give_up();
    if (saves) loop_.save_last_step();
  }

 private:
  WorkerParts worker_parts();
  void end_ranks();

  const RunOptions options_;
  const std::unique_ptr<RankGroups> groups_;
  RunComponents parts_;
  RunReporting reporting_;
  CheckpointSchedule schedule_;
  RunTasks tasks_;
  RankZero ranks_;
  RunTrainer trainer_;
  RunCheckpoints checkpoints_;
  const std::unique_ptr<ExternalRollouts> external_;  // nullptr: the run itself holds the conversations
  RunLoop loop_;                                      // its threads use the members above
  std::optional<ViewServer> view_;                    // only with report.port; reads the run's files
};

Run::Run(const RunSettings& settings, const RunOptions& options, std::unique_ptr<RankGroups> groups)
    : options_(options),
      groups_(std::move(groups)),
      parts_(settings, options.stop, groups_->trainers),
      reporting_(parts_.settings, *parts_.folder, parts_.clock, parts_.total_steps, options.display),
      schedule_(parts_.settings.saver, parts_.clock),
      tasks_(parts_.problems, parts_.settings),
      ranks_(*groups_, parts_),
      trainer_(parts_, ranks_),
      checkpoints_(parts_, tasks_, schedule_, ranks_.num_ranks()),
      external_(options.external ? options.external(parts_.settings, ranks_.engine()) : nullptr),
      loop_(parts_.settings, worker_parts(), parts_.valid, schedule_, *parts_.folder, reporting_,
            {.total_steps = parts_.total_steps,
             .num_problems = static_cast<int64_t>(parts_.problems.size()),
             .num_engines = settings.rollout.ranks > 0 ? settings.rollout.ranks : ranks_.num_ranks(),
             .threads = parts_.threads,
             .stop = options.stop}) {
  for (const std::string& warning : options_.warnings)
    if (!warning.empty()) log_warning(warning);
  if (groups_->trainers) send_checkpoint(parts_.folder->checkpoint(), *groups_->trainers);
  if (auto state = checkpoints_.resume()) loop_.restore(std::move(*state));
  if (!parts_.settings.report.port) return;
  view_.emplace(std::vector{view_of_run(parts_.folder->path())}, *parts_.settings.report.port);
  // log.txt is not for the user alone, so it does not have the token.
  const std::filesystem::path file = control_file(parts_.folder->path(), kPageUrl);
  write_file_atomically(file, view_->url_with_token() + "\n");
  log_info(str("the page of the run: ", view_->url(), " (with its buttons: the URL in ", file.string(), ")"));
}

WorkerParts Run::worker_parts() {
  return {.engine = ranks_.engine(),
          .weights = ranks_.weights(),
          .codec = parts_.encoder,
          .reward = *parts_.reward,
          .filter = parts_.filter.get(),
          .clock = parts_.clock,
          .tasks = tasks_,
          .trainer = trainer_,
          .checkpoints = checkpoints_,
          .environment = parts_.environment.get(),
          .conversations = parts_.conversations ? &*parts_.conversations : nullptr,
          .external = external_.get()};
}

void Run::end_ranks() {
  if (ranks_.num_ranks() == 1) return;
  ranks_.end();
  if (options_.on_ranks_ended) options_.on_ranks_ended();
}

RunSummary Run::work() {
  const RunFolder& folder = *parts_.folder;
  if (!loop_.run()) {
    end_ranks();
    throw Interrupted(str("stopped after step ", loop_.num_steps(), " of ", parts_.total_steps,
                          "; checkpoint in ", folder.path().string(),
                          ". The same command continues from there"));
  }
  const auto comparison = compare_with_dense(parts_, reporting_.display(), options_.stop);
  reporting_.end("finished");
  RunSummary summary = summarise(parts_.settings, folder, loop_.num_steps());
  summary.comparison = comparison;
  end_ranks();
  return summary;
}

}  // namespace

RunSummary run_training(const RunSettings& settings, const RunOptions& options) {
  if (settings.threads > 0) at::set_num_threads(static_cast<int>(settings.threads));
  check_ranks(settings, options.ranks ? options.ranks->size() : 1);
  auto groups = std::make_unique<RankGroups>(options.ranks, settings);
  if (options.ranks && options.ranks->rank() > 0) {
    follow_rank_zero(settings, options.engine_command, *groups);
    return {};
  }
  auto run = std::make_unique<Run>(settings, options, std::move(groups));
  try {
    return run->work();
  } catch (const std::exception& error) {
    log_debug(str("the run ended: ", error.what()));  // for log.txt; the caller shows it to the user
    // A thread that hangs for ever cannot be joined, and everything that it uses must stay alive.
    const bool hangs = dynamic_cast<const StallError*>(&error);
    const bool is_stopped = dynamic_cast<const Interrupted*>(&error) != nullptr;
    run->give_up(/*saves=*/!hangs && !is_stopped, is_stopped ? "" : error.what());
    if (hangs) (void)run.release();
    throw;
  }
}

}  // namespace bough
