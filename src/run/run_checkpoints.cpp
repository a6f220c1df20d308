#include "run/run_checkpoints.h"

#include <string>
#include <utility>

#include "base/log.h"

namespace bough {

RunTasks::RunTasks(const Dataset& problems, const RunSettings& settings)
    : problems_(problems),
      order_(problems, static_cast<uint64_t>(settings.seed), settings.train_dataset.shuffle) {}

GroupTask RunTasks::task(uint64_t id) {
  const MutexLock lock(mutex_);
  const Problem& problem = problems_[order_.index_at(static_cast<int64_t>(id))];
  return {.id = id, .name = problem.id, .problem = &problem};
}

Json RunTasks::save(const ControllerState& state) {
  const MutexLock lock(mutex_);
  return to_json(state, order_);
}

ControllerState RunTasks::restore(const Json& saved) {
  const MutexLock lock(mutex_);
  return controller_state_from_json(saved, order_);
}

bool CheckpointSchedule::is_due(int64_t step) const {
  const double minutes = seconds_between(last_, clock_.now()) / 60;
  return (settings_.freq_steps > 0 && step % settings_.freq_steps == 0) ||
         (settings_.freq_minutes > 0 && minutes >= settings_.freq_minutes);
}

RunCheckpoints::RunCheckpoints(RunComponents& parts, RunTasks& tasks, CheckpointSchedule& schedule,
                               int64_t num_ranks)
    : settings_(parts.settings),
      folder_(*parts.folder),
      trainer_(parts.trainer),
      valid_(parts.valid),
      tasks_(tasks),
      schedule_(schedule),
      total_steps_(parts.total_steps),
      num_ranks_(num_ranks),
      num_threads_(parts.threads.training) {}

namespace {

// The numbers of threads and ranks decide the order of sums, and with it the last bits.
Json thread_state(const RunSettings& settings, int64_t num_threads, int64_t num_ranks) {
  Json state = {{"threads", num_threads}};
  if (num_ranks > 1) state["ranks"] = num_ranks;
  if (settings.rollout.ranks > 0) state["engine_ranks"] = settings.rollout.ranks;
  return state;
}

std::string engine_ranks_text(int64_t count) {
  return count > 0 ? str(" (", count, " generating)") : "";
}

}  // namespace

std::optional<ControllerState> RunCheckpoints::resume() {
  if (!folder_.checkpoint()) return std::nullopt;
  const Json saved = trainer_.load(*folder_.checkpoint());
  ControllerState state = tasks_.restore(saved.at("controller"));
  valid_.check_unchanged(saved.value("valid_dataset", Json::object()));  // absent up to version 0.1.0
  // If a resumed run wrote these metrics and was killed, they are in the file already.
  const auto records = read_metrics(folder_.path() / "metrics.jsonl");
  if (!records.empty() && records.back().step >= state.step) state.unwritten_metrics.reset();
  const Json before = saved.value("environment", Json());
  if (before != thread_state(settings_, num_threads_, num_ranks_)) {
    log_warning(str(
        "the run was computed with ", before.value("threads", 0), " threads on ", before.value("ranks", 1),
        " ranks", engine_ranks_text(before.value("engine_ranks", 0)), ", and continues with ", num_threads_,
        " on ", num_ranks_, engine_ranks_text(settings_.rollout.ranks),
        ": results stay correct, but not bit for bit the same; to keep the bits, set OMP_NUM_THREADS or "
        "threads, or --ranks, as before"));
  }
  log_info(str("resumed from ", folder_.checkpoint()->directory.string(), ": step ", state.step, " of ",
               total_steps_));
  return state;
}

void RunCheckpoints::take_snapshot() {
  snapshot_ = trainer_.snapshot(/*copies=*/true);
}

void RunCheckpoints::write(const ControllerState& state, bool copied) {
  const TrainingSnapshot present = copied ? TrainingSnapshot() : trainer_.snapshot(/*copies=*/false);
  const TrainingSnapshot& source = copied ? snapshot_ : present;
  const Json json = {{"environment", thread_state(settings_, num_threads_, num_ranks_)},
                     {"coefficients", source.coefficients},
                     {"valid_dataset", valid_.identity()},
                     {"controller", tasks_.save(state)}};
  save_run_checkpoint(
      folder_.path(), state.step, *source.model, source.optimizer, json,
      {.source_model = settings_.model.path,
       .keep_last = settings_.saver.keep,
       .write_more = [&](const auto& directory) { source.save_more(directory, settings_.model.path); }});
  if (copied) snapshot_ = {};
  schedule_.has_written();
  RunFolder::write_report(folder_.path());
}

}  // namespace bough
