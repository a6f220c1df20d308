// The controller's checkpoints: when one begins, what it covers, and how a run continues from one.
#include <utility>

#include "base/log.h"
#include "control/controller.h"

namespace bough {

void Controller::restore(ControllerState state) {
  num_steps_ = state.step;
  checkpointed_step_ = state.step;
  next_position_ = state.next_position;
  buffered_ = std::move(state.buffered);
  awaiting_ = std::move(state.awaiting);
  partial_before_ = std::move(state.running);
  std::set<int64_t> again = std::move(state.unfinished);
  for (const auto& [id, samples] : partial_before_) again.insert(static_cast<int64_t>(id));
  again_.assign(again.begin(), again.end());
  num_sampled_ = num_buffered() + num_awaiting();
  unwritten_ = std::move(state.unwritten_metrics);
}

ControllerState Controller::state_at_step() const {
  ControllerState state{.step = num_steps_, .next_position = next_position_};
  state.unfinished.insert(again_.begin(), again_.end());
  for (const uint64_t id : running_) state.unfinished.insert(static_cast<int64_t>(id));
  if (options_.max_staleness > 0) {
    state.buffered = buffered_;
    state.awaiting = awaiting_;
    state.running = partial_before_;
    return state;
  }
  // With eta (max_staleness) 0, unfinished groups are generated again and get the same samples: a step's
  // samples depend only on the seed, the step's number and the weights.
  for (const auto& [id, group] : awaiting_) state.unfinished.insert(static_cast<int64_t>(id));
  for (const auto& [id, group] : buffered_) state.unfinished.insert(static_cast<int64_t>(id));
  return state;
}

// At the end of a step: begins a checkpoint if one is due and none is being written.
void Controller::begin_checkpoint() {
  const bool is_last = is_over() || is_stopping_;
  const bool is_due = is_last || checkpoint_is_overdue_ || policy_.checkpoint_due(num_steps_);
  if (!is_due || checkpointed_step_ == num_steps_) return;
  if (checkpoint_) {
    if (!is_last && !checkpoint_is_overdue_) warn_of_late_checkpoint();
    checkpoint_is_overdue_ = true;
    return;
  }
  checkpoint_is_overdue_ = false;
  Checkpoint& checkpoint = checkpoint_.emplace();
  checkpoint.begin = clock_.now();
  checkpoint.state = state_at_step();
  observer_.on_state(num_steps_);
  if (computes_beside()) {
    checkpoint.running.insert(running_.begin(), running_.end());
    // If no training follows, the model does not change while it is written, so no copy is needed.
    checkpoint.copied = !is_last;
  }
  checkpoint.has_running = checkpoint.running.empty();
  if (!checkpoint.has_running) workers_.save_running();
  checkpoint.has_weights = !checkpoint.copied;
  if (!checkpoint.copied) return;
  trainer_ = Trainer::kSnapshotting;
  workers_.take_snapshot();
}

// If every checkpoint is late, the log says so again only if they have become twice as late.
void Controller::warn_of_late_checkpoint() {
  const auto seconds = static_cast<int64_t>(seconds_between(checkpoint_->begin, clock_.now()));
  if (late_warned_seconds_ && seconds <= 2 * *late_warned_seconds_) return;
  late_warned_seconds_ = seconds;
  log_warning(str("the checkpoint of step ", num_steps_, " is late: that of step ", checkpoint_->state.step,
                  checkpoint_->is_written ? " is still being written" : " still waits for its evaluation",
                  " after ", seconds,
                  " s. The next checkpoint follows at the end of the first step after that; save less often "
                  "(saver.freq_steps, saver.freq_minutes) or to a faster disk"));
}

void Controller::handle(SnapshotTaken&) {
  BOUGH_CHECK(trainer_ == Trainer::kSnapshotting && checkpoint_, "unexpected snapshot");
  trainer_ = Trainer::kIdle;
  trainer_free_since_ = clock_.now();
  checkpoint_->has_weights = true;
}

void Controller::handle(RunningSaved& event) {
  BOUGH_CHECK(checkpoint_ && !checkpoint_->has_running, "unexpected list of running requests");
  for (RunningRequest& request : event.requests) {
    if (checkpoint_->running.erase(request.id) > 0 && !request.samples.empty())
      checkpoint_->state.running.emplace(request.id, std::move(request.samples));
  }
  for (const auto& [id, samples] : checkpoint_->state.running)
    checkpoint_->state.unfinished.erase(static_cast<int64_t>(id));
  checkpoint_->has_running = true;
}

// The metrics of a checkpoint's steps are written to disk first, so that a checkpoint covers complete steps.
void Controller::advance_checkpoint() {
  if (!checkpoint_ || checkpoint_->is_written || !checkpoint_->has_running || !checkpoint_->has_weights)
    return;
  if (!records_.empty() && records_.front().step <= checkpoint_->state.step) return;
  for (const auto& [id, group] : checkpoint_->state.awaiting)
    checkpoint_->state.unfinished.erase(static_cast<int64_t>(id));
  if (unwritten_) checkpoint_->state.unwritten_metrics = unwritten_;
  checkpoint_->is_written = true;
  workers_.write_checkpoint(checkpoint_->state, checkpoint_->copied);
}

// A full disk may have room later. The run goes on and tries again after the next step. For the last
// checkpoint there is no later attempt, so its failure is the run's error.
void Controller::handle(CheckpointWritten& event) {
  BOUGH_CHECK(checkpoint_ && checkpoint_->is_written, "unexpected checkpoint");
  const bool is_last = is_stopping_ || is_over();
  const int64_t step = checkpoint_->state.step;
  checkpoint_.reset();
  if (event.error.empty()) {
    checkpointed_step_ = step;
    return;
  }
  if (is_last && step == num_steps_) {
    last_step_.reset();  // it would fail again
    throw IoError(event.error);
  }
  checkpoint_is_overdue_ = true;
  log_warning(str(event.error, "; the run continues and tries again after the next step"));
}

std::optional<ControllerState> Controller::take_unsaved_step() {
  if (!last_step_ || last_step_->step == checkpointed_step_) return std::nullopt;
  std::optional<ControllerState> state = std::exchange(last_step_, std::nullopt);
  for (PendingRecord& record : records_) {
    if (record.awaits_evaluation && record.step == state->step)
      unwritten_ = std::exchange(record.metrics, {});
    record.awaits_evaluation = false;
  }
  write_records();
  state->unwritten_metrics = unwritten_;
  return state;
}

std::optional<ControllerState> Controller::take_unwritten_snapshot() {
  if (!checkpoint_ || !checkpoint_->copied || !checkpoint_->has_weights) return std::nullopt;
  ControllerState state = std::move(checkpoint_->state);
  checkpoint_.reset();
  return state;
}

}  // namespace bough
