#include "control/controller.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace bough {

std::optional<int64_t> oldest_version(const FinishedGroup& group) {
  std::optional<int64_t> oldest;
  for (const Trajectory& sample : group.samples)
    for (const int64_t version : sample.versions)
      if (version >= 0) oldest = std::min(oldest.value_or(version), version);
  return oldest;
}

Trajectory ScoredGroup::row(size_t i) const {
  Trajectory row = group->samples[i];
  if (!rewards.empty()) set_reward(row, rewards[i]);
  return row;
}

std::vector<Trajectory> ScoredGroup::rows() const {
  std::vector<Trajectory> rows;
  for (size_t i = 0; i < group->samples.size(); ++i) rows.push_back(row(i));
  return rows;
}

Controller::Controller(Workers& workers, const Clock& clock, ControllerOptions options,
                       ControllerPolicy& policy, ControllerObserver& observer)
    : workers_(workers), clock_(clock), options_(options), policy_(policy), observer_(observer) {
  BOUGH_CHECK(options_.batch_groups >= 1 && options_.max_staleness >= 0 && options_.total_steps >= 0,
              "got batch_groups ", options_.batch_groups, ", max_staleness ", options_.max_staleness,
              ", total_steps ", options_.total_steps);
  BOUGH_CHECK(options_.weight_sync_steps <= options_.max_staleness + 1, "weights are published every ",
              options_.weight_sync_steps, " steps: the staleness limiter would wait for ever");
}

// ---- Staleness limiter.

bool Controller::staleness_limiter_allows() const {
  const int64_t begun_steps = num_steps_ + (training_.empty() ? 0 : 1);
  const int64_t slots = std::min(engine_version_ + options_.max_staleness + 1, options_.total_steps);
  const int64_t ahead = num_buffered() + num_awaiting();
  if (options_.max_buffered_groups > 0 && ahead + num_running() >= options_.max_buffered_groups) return false;
  return begun_steps * options_.batch_groups + ahead + num_running() < slots * options_.batch_groups;
}

bool Controller::has_sampled_enough() const {
  const int64_t most = options_.max_generated_batches;
  return most > 0 && refused_since_batch_ > (most - 1) * options_.batch_groups;
}

bool Controller::can_sample() const {
  return !again_.empty() || options_.total_groups == 0 || next_position_ < options_.total_groups;
}

bool Controller::is_drained() const {
  return !can_sample() && is_round_over();
}

// With the weights that the engine holds, no group is left to generate, and no newer weights are published.
bool Controller::is_engine_done() const {
  return is_round_over() && engine_version_ == published_version_ &&
         !(can_sample() && staleness_limiter_allows());
}

bool Controller::is_over() const {
  return num_steps_ >= options_.total_steps || (is_drained() && buffered_.empty() && training_.empty());
}

bool Controller::holds() const {
  // If engine and trainer take turns, a step in work has more groups than those that wait between two steps.
  return is_pausing_ &&
         (computes_beside() ||
          (is_round_over() && num_buffered() <= options_.max_staleness * options_.batch_groups));
}

bool Controller::is_paused() const {
  return holds() && is_round_over() && trainer_ == Trainer::kIdle && evaluation_ == Evaluation::kNone &&
         !checkpoint_;
}

void Controller::drop(uint64_t id, const std::string& reason) {
  ++dropped_[reason];
  log_debug(str("group ", id, " is dropped: ", reason));
}

Controller::Counts Controller::counts() const {
  Counts counts{.sampled = num_sampled_,
                .trained = num_trained_,
                .training = static_cast<int64_t>(training_.size()),
                .buffered = num_buffered(),
                .awaiting = num_awaiting(),
                .running = num_running(),
                .version = engine_version_};
  for (const auto& [reason, count] : dropped_) counts.dropped += count;
  return counts;
}

void Controller::check_integrity() const {
  const Counts now = counts();
  BOUGH_CHECK(
      now.sampled == now.trained + now.training + now.buffered + now.awaiting + now.running + now.dropped,
      now.sampled, " groups sampled, but ", now.trained, " trained, ", now.training, " in training, ",
      now.buffered, " buffered, ", now.awaiting, " awaiting rewards, ", now.running, " running, ",
      now.dropped, " dropped");
}

// ---- Events.

void Controller::start() {
  last_event_ = clock_.now();
  trainer_free_since_ = last_event_;
  workers_.publish(num_steps_);
  published_version_ = num_steps_;
  if (unwritten_ || (num_steps_ == 0 && policy_.evaluation_due(0, false))) {
    evaluation_ = Evaluation::kWanted;
    evaluation_step_ = num_steps_;
    records_.push_back({num_steps_, unwritten_ ? *unwritten_ : MetricValues(), true});
    unwritten_.reset();
  }
  for (const auto& [id, group] : awaiting_) workers_.score(group);
  for (const auto& [id, group] : buffered_) observer_.on_group(group, num_steps_ + 1, "");
  sums_.engine = sums_at_step_.engine = workers_.engine_statistics();
  decide();
}

void Controller::on(Event event) {
  std::visit([this](auto& what) { handle(what); }, event);
  if (!std::holds_alternative<TimePassed>(event)) {
    last_event_ = clock_.now();
    stall_warned_seconds_ = 0;
  }
  decide();
}

void Controller::handle(GroupGenerated& event) {
  const uint64_t id = event.group->id;
  BOUGH_CHECK(running_.erase(id) == 1, "group ", id, " was generated, but it is not running");
  last_generated_ = clock_.now();
  if (checkpoint_ && !checkpoint_->has_running && checkpoint_->running.erase(id) > 0)
    checkpoint_->state.awaiting.emplace(id, event.group);
  awaiting_.emplace(id, event.group);
  workers_.score(std::move(event.group));
}

void Controller::handle(GroupFailed& event) {
  BOUGH_CHECK(running_.erase(event.id) == 1, "group ", event.id, " failed, but it is not running");
  if (checkpoint_) checkpoint_->running.erase(event.id);  // a resumed run begins the group again
  drop(event.id, event.reason);
}

void Controller::count_failures(const std::vector<RewardResult>& rewards) {
  for (const RewardResult& result : rewards) {
    consecutive_failures_ = result.failed ? consecutive_failures_ + 1 : 0;
    if (!result.failed) continue;
    ++sums_.reward_failures;
    if (consecutive_failures_ < options_.max_consecutive_failures) continue;
    throw IoError(
        str("the last ", consecutive_failures_,
            " rewards all failed, the last one with: ", quoted(result.message, 300),
            ". Fix the reward function (setting reward), or raise reward_service.max_consecutive_failures; "
            "the same command resumes from the last checkpoint"));
  }
}

void Controller::count_filter_failures(const FilterVerdict& verdict) {
  consecutive_filter_failures_ = verdict.error.empty() ? 0 : consecutive_filter_failures_ + 1;
  if (verdict.error.empty()) return;
  if (filter_failures_since_batch_++ == 0) first_filter_error_ = verdict.error;
  if (consecutive_filter_failures_ == 1)
    log_warning(str("a group is dropped because the filter failed: ", quoted(verdict.error, 300)));
  if (consecutive_filter_failures_ < options_.max_consecutive_failures) return;
  throw IoError(str("the filter failed for the last ", consecutive_filter_failures_,
                    " groups, for the last one with: ", quoted(verdict.error, 300),
                    ". Fix the function (setting filter), or raise reward_service.max_consecutive_failures; "
                    "the same command resumes from the last checkpoint"));
}

// The run stops with an error if filters refuse all groups of max_generated_batches batches in a row: there
// is nothing to learn from.
void Controller::refuse(uint64_t id, const std::string& reason) {
  drop(id, reason);
  ++refused_since_batch_;
  const int64_t most = options_.max_generated_batches;
  if (most == 0 || !buffered_.empty() || refused_since_batch_ < most * options_.batch_groups) return;
  if (filter_failures_since_batch_ > 0)
    throw IoError(
        str("the filter raised for ", filter_failures_since_batch_, " of the last ", refused_since_batch_,
            " groups, which filters all refused, first with: ", quoted(first_filter_error_, 300),
            ". Fix the function (setting filter); the same command resumes from the last checkpoint"));
  throw IoError(
      str("filters refused all of ", refused_since_batch_, " groups that were generated for step ",
          num_steps_ + 1, ", the last one for ", quoted(reason),
          ". The problems are too easy or too hard for the model, or the filter is too strict; other "
          "problems, a larger gconfig.n_samples, or a larger actor.max_num_gen_batches (",
          most, "; 0: no limit) may help; the same command resumes from the last checkpoint"));
}

// A failed reward does not count as 0: its sample is left out. The group is dropped if fewer than
// options_.min_group samples are left, or if its baseline has no reward. Else it goes on without the sample.
void Controller::handle(GroupScored& event) {
  const auto found = awaiting_.find(event.id);
  BOUGH_CHECK(found != awaiting_.end(), "group ", event.id, " was scored, but it awaits no rewards");
  const ScoredGroup scored{std::move(found->second), std::move(event.rewards)};
  const std::vector<Trajectory>& samples = scored.group->samples;
  awaiting_.erase(found);
  BOUGH_CHECK(scored.rewards.empty() || scored.rewards.size() == samples.size(), "got ",
              scored.rewards.size(), " rewards for ", samples.size(), " samples");
  count_failures(scored.rewards);
  int64_t num_valid = 0, size = 0;  // trajectories, not rows of the batch; without baselines
  bool has_lost_baseline = false;
  for (size_t i = 0; i < samples.size(); ++i) {
    if (samples[i].baseline) {
      has_lost_baseline |= !scored.is_valid(i);
      continue;
    }
    if (!begins_trajectory(samples, i)) continue;
    ++size;
    num_valid += scored.is_valid(i);
  }
  const bool has_rewards = !has_lost_baseline && num_valid >= std::min(options_.min_group, size);
  const std::string reason = has_rewards ? why_refused(scored, event.verdict) : "too few rewards";
  observer_.on_group(scored, num_steps_ + 1, reason);
  if (!has_rewards) drop(event.id, reason);
  else if (!reason.empty()) refuse(event.id, reason);
  else buffered_.emplace(event.id, scored);
}

// By the run's and the user's filters; empty: accepted.
std::string Controller::why_refused(const ScoredGroup& scored, const std::optional<FilterVerdict>& verdict) {
  if (const auto reason = policy_.why_refused(scored)) return *reason;
  if (!verdict) return "";
  count_filter_failures(*verdict);
  if (!verdict->error.empty()) return "filter failed";
  return verdict->keeps ? "" : "filter";
}

void Controller::handle(WeightsTaken& event) {
  BOUGH_CHECK(event.version >= engine_version_, "version ", event.version, " after ", engine_version_);
  engine_version_ = event.version;
  has_asked_for_weights_ = false;
  sums_.interrupted += event.interrupted_samples;
}

void Controller::handle(TrainingDone& event) {
  BOUGH_CHECK(trainer_ == Trainer::kTraining && event.record.step == num_steps_ + 1, "step ",
              event.record.step, " was trained after ", num_steps_);
  num_trained_ += static_cast<int64_t>(training_.size());
  event.record.groups = std::exchange(training_, {});
  trainer_ = Trainer::kIdle;
  trainer_free_since_ = clock_.now();
  num_steps_ = event.record.step;
  if (training_publishes_) published_version_ = num_steps_;
  const bool is_requested = std::exchange(evaluation_is_requested_, false);
  const bool evaluates = policy_.evaluation_due(num_steps_, is_over()) || is_requested;
  add_own_metrics(event.record);
  observer_.on_batch(event.record);
  if (evaluates) {
    if (published_version_ < num_steps_) {  // not published yet: nobody knew that the run ends here
      workers_.publish(num_steps_);
      published_version_ = num_steps_;
    }
    if (evaluation_ == Evaluation::kNone) {
      evaluation_ = Evaluation::kWanted;
      evaluation_step_ = num_steps_;
    } else {
      log_warning(str("step ", num_steps_, " is not evaluated: the evaluation of step ", evaluation_step_,
                      " is still running; evaluate less often (evaluator.freq_steps) or on fewer problems"));
    }
  }
  const bool awaits = evaluation_ != Evaluation::kNone && evaluation_step_ == num_steps_;
  records_.push_back({num_steps_, std::move(event.record.metrics), awaits});
  last_step_ = state_at_step();
  begin_checkpoint();
}

void Controller::handle(EvaluationDone& event) {
  BOUGH_CHECK(evaluation_ == Evaluation::kRunning, "unexpected evaluation result");
  evaluation_ = Evaluation::kNone;
  for (PendingRecord& record : records_) {
    if (!record.awaits_evaluation) continue;
    // The run's stop cancelled the evaluation of the last step. The step's metrics are not recorded now but
    // stored in the checkpoint. The resumed run evaluates the step, then records them.
    if (!event.metrics && is_stopping_ && record.step == num_steps_) {
      unwritten_ = std::move(record.metrics);
      records_.pop_back();
      break;
    }
    record.awaits_evaluation = false;
    if (event.metrics) record.metrics.merge(*event.metrics);
    else if (!is_stopping_)
      log_warning(str("the evaluation of step ", record.step, " was stopped after ",
                      options_.evaluation_seconds, " s (evaluator.timeout_seconds); the run continues"));
    break;
  }
}

void Controller::handle(WorkerFailed& event) {
  std::rethrow_exception(event.error);
}

void Controller::handle(StopRequested&) {
  if (is_stopping_) return;
  is_stopping_ = true;
  if (evaluation_ == Evaluation::kRunning) workers_.cancel_evaluation();
}

void Controller::handle(PauseRequested&) {
  is_pausing_ = true;
}

// The time of the pause counts for no step.
void Controller::handle(ResumeRequested&) {
  is_pausing_ = false;
  if (!paused_since_) return;
  const Clock::Duration pause = clock_.now() - *paused_since_;
  paused_since_.reset();
  trainer_free_since_ += pause;
  if (step_begin_) *step_begin_ += pause;
  if (has_samples_since_) *has_samples_since_ += pause;
  last_generated_ += pause;
}

void Controller::handle(CheckpointRequested&) {
  checkpoint_is_overdue_ = true;
  if (is_paused()) begin_checkpoint();
}

void Controller::handle(EvaluationRequested&) {
  evaluation_is_requested_ = true;
}

// While the run waits for agents there is no stall error, only a warning that says how long nothing has
// happened. The agents' leases are the deadlines.
void Controller::handle(TimePassed&) {
  const Clock::Time now = clock_.now();
  if (is_paused()) last_event_ = now;
  const double quiet = seconds_between(std::max(last_event_, workers_.last_progress()), now);
  const bool waits = !workers_.waits_for_external().empty();
  if (options_.stall_seconds > 0 && quiet >= options_.stall_seconds && !waits)
    throw StallError(str("no progress for ", static_cast<int64_t>(quiet), " s: ", workers_.busy_with(), "; ",
                         activity(),
                         ". If this is expected, raise stall_seconds; the same command resumes from the last "
                         "checkpoint"));
  if (quiet >= std::max(60.0, 2 * stall_warned_seconds_)) {
    log_warning(str("no progress for ", static_cast<int64_t>(quiet), " s: ", workers_.busy_with()));
    stall_warned_seconds_ = quiet;
  }
}

// ---- Decisions.

void Controller::decide() {
  if (is_finished_) return;
  if (is_stopping_ && evaluation_ == Evaluation::kWanted) {  // the resumed run evaluates in its place
    evaluation_ = Evaluation::kRunning;
    EvaluationDone given_up;
    handle(given_up);
  }
  write_records();
  advance_checkpoint();
  advance_engine();
  begin_groups();
  begin_training();
  write_records();
  finish_if_done();
  if (is_paused() && !paused_since_) paused_since_ = clock_.now();
  check_integrity();
}

// Makes the engine take published weights, and starts the evaluation that waits for them.
void Controller::advance_engine() {
  if (evaluation_ == Evaluation::kRunning) return;
  const bool may_take = options_.interruptible || running_.empty();
  if (published_version_ > engine_version_ && may_take && !has_asked_for_weights_) {
    workers_.take_weights();
    has_asked_for_weights_ = true;
  }
  if (evaluation_ != Evaluation::kWanted || engine_version_ != evaluation_step_) return;
  evaluation_ = Evaluation::kRunning;
  workers_.evaluate(clock_.now() + std::chrono::duration_cast<Clock::Duration>(
                                       std::chrono::duration<double>(options_.evaluation_seconds)));
}

void Controller::begin_groups() {
  if (is_stopping_ || engine_version_ < 0 || holds()) return;
  if (!computes_beside() && evaluation_ != Evaluation::kNone) return;
  if (!options_.interruptible && published_version_ != engine_version_) return;
  if (!computes_beside()) {
    if (is_round_over() && has_sampled_enough() && !buffered_.empty()) return;  // they are trained on
    if (is_round_over()) round_left_ = (options_.max_staleness + 1) * options_.batch_groups - num_buffered();
    if (round_left_ == 0) return;
  }
  while (can_sample() && staleness_limiter_allows() &&
         num_running() * options_.group_size < options_.samples_in_flight) {
    int64_t position = 0;
    if (again_.empty()) {
      position = next_position_++;
    } else {
      position = again_.front();
      again_.pop_front();
    }
    const auto id = static_cast<uint64_t>(position);
    std::vector<PartialRollout> partial;
    if (auto node = partial_before_.extract(id)) partial = std::move(node.mapped());
    running_.insert(id);
    ++num_sampled_;
    workers_.begin(id, std::move(partial));
    if (!computes_beside() && --round_left_ == 0) return;
  }
}

void Controller::begin_training() {
  if (trainer_ != Trainer::kIdle || num_steps_ >= options_.total_steps || holds()) return;
  // The weights to be evaluated must not be replaced before the engine has them.
  if (evaluation_ == Evaluation::kWanted) return;
  if (!computes_beside() && (evaluation_ != Evaluation::kNone || checkpoint_)) return;
  if (!step_begin_) step_begin_ = computes_beside() ? trainer_free_since_ : clock_.now();
  const bool is_last = is_drained() && num_buffered() > 0;
  const bool gives_up = has_sampled_enough() && num_buffered() > 0 && (computes_beside() || is_round_over());
  const int64_t wanted =
      is_last || gives_up ? std::min(options_.batch_groups, num_buffered()) : options_.batch_groups;
  if (num_buffered() + num_awaiting() < wanted) has_samples_since_.reset();
  else if (!has_samples_since_) has_samples_since_ = clock_.now();
  if (num_buffered() < wanted || is_stopping_) return;
  if (!computes_beside() && !gives_up && !is_engine_done()) return;
  if (gives_up && !is_last && wanted < options_.batch_groups)
    log_warning(str("step ", num_steps_ + 1, " is trained on ", wanted, " of ", options_.batch_groups,
                    " groups: filters refused ", refused_since_batch_,
                    " others, the most that actor.max_num_gen_batches allows"));
  refused_since_batch_ = filter_failures_since_batch_ = 0;
  TrainOrder order{.step = num_steps_ + 1, .groups = {}};
  for (int64_t i = 0; i < wanted; ++i) {
    auto oldest = buffered_.extract(buffered_.begin());
    training_.push_back(oldest.key());
    order.groups.push_back(std::move(oldest.mapped()));
  }
  const bool ends = order.step >= options_.total_steps || (is_drained() && buffered_.empty());
  order.publish = order.step % options_.weight_sync_steps == 0 || policy_.evaluation_due(order.step, ends);
  training_publishes_ = order.publish;
  trainer_ = Trainer::kTraining;
  train_begin_ = clock_.now();
  workers_.train(std::move(order));
}

// Writes records in the order of steps, up to the first one whose evaluation is still running.
void Controller::write_records() {
  while (!records_.empty() && !records_.front().awaits_evaluation) {
    const PendingRecord& record = records_.front();
    if (!record.metrics.empty()) observer_.on_record(record.step, record.metrics);
    records_.pop_front();
  }
}

void Controller::finish_if_done() {
  if (!is_over() && !is_stopping_) return;
  if (trainer_ != Trainer::kIdle || evaluation_ != Evaluation::kNone || checkpoint_) return;
  begin_checkpoint();
  advance_checkpoint();
  is_finished_ = !checkpoint_;
}

std::string Controller::activity() const {
  if (is_paused()) return str("paused after step ", num_steps_);
  std::vector<std::string> parts;
  if (trainer_ == Trainer::kTraining) parts.push_back(str("train step ", num_steps_ + 1));
  if (trainer_ == Trainer::kSnapshotting) parts.emplace_back("copy weights for the checkpoint");
  if (evaluation_ == Evaluation::kRunning) parts.push_back(str("evaluation of step ", evaluation_step_));
  if (checkpoint_ && checkpoint_->is_written) parts.emplace_back("checkpoint");
  if (num_steps_ < options_.total_steps && (computes_beside() || parts.empty()))
    parts.push_back(str("rollout ", num_buffered(), "/", options_.batch_groups));
  if (!awaiting_.empty()) parts.push_back(str(num_awaiting(), " awaiting rewards"));
  if (std::string outside = workers_.waits_for_external(); !outside.empty())
    parts.push_back(std::move(outside));
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : ", ") + part;
  return is_pausing_ ? "pausing: " + text : text;
}

// ---- Metrics of a step.

void Controller::add_own_metrics(StepRecord& record) {
  MetricValues& metrics = record.metrics;
  const Clock::Time now = clock_.now();
  const Clock::Time begin = step_begin_.value_or(train_begin_);
  // An engine that takes turns with the trainer may generate later batches after this one's samples.
  const Clock::Time generated =
      std::min(computes_beside() ? has_samples_since_.value_or(train_begin_) : last_generated_, train_begin_);
  sums_.engine = workers_.engine_statistics();
  sums_.engine_idle = workers_.engine_idle_seconds();
  sums_.dropped = dropped_;
  const double step_seconds = seconds_between(begin, now);
  const double rollout_seconds = seconds_between(begin, std::max(begin, generated));
  const auto gained = [&](int64_t EngineStatistics::*member) {
    return static_cast<double>(sums_.engine.*member - sums_at_step_.engine.*member);
  };
  const double new_tokens = gained(&EngineStatistics::new_tokens);
  double trained_tokens = 0;
  for (const Trajectory& sample : record.batch)
    if (sample.in_loss()) trained_tokens += static_cast<double>(sample.num_generated());
  metrics["time/rollout"] = rollout_seconds;
  metrics["time/reward"] = seconds_between(std::max(begin, generated), std::max(begin, train_begin_));
  metrics["time/step"] = step_seconds;
  metrics.try_emplace("time/train", seconds_between(train_begin_, now));
  // If engine and trainer take turns, the engine generates only in a part of the step, rollout_seconds.
  metrics["perf/generated_tokens_per_s"] =
      new_tokens / std::max(1e-9, computes_beside() ? step_seconds : rollout_seconds);
  metrics["perf/effective_tokens_per_s"] = trained_tokens / std::max(1e-9, step_seconds);
  metrics["rollout/new_tokens"] = new_tokens;
  metrics["rollout/prefill_tokens"] = gained(&EngineStatistics::prefill_tokens);
  for (const auto& [name, count] :
       {std::pair{"rollout/replayed_experts", &EngineStatistics::replayed_experts},
        {"rollout/rerouted_experts", &EngineStatistics::rerouted_experts}})
    if (gained(count) > 0) metrics[name] = gained(count);
  const double in_context = gained(&EngineStatistics::blocks_in_context);
  if (in_context > 0) metrics["rollout/active_pages"] = gained(&EngineStatistics::blocks_read) / in_context;
  double dropped = 0;
  for (const auto& [reason, count] : dropped_) {
    const auto since = static_cast<double>(count - sums_at_step_.dropped[reason]);
    dropped += since;
    std::string name = reason;
    std::replace(name.begin(), name.end(), ' ', '_');
    if (since > 0) metrics["refused/" + name] = since;
  }
  metrics["rollout/groups_refused"] = dropped;
  sums_.outside = workers_.external_metrics();
  for (const auto& [name, value] : sums_.outside)
    metrics[name] = name.ends_with("_open") ? value : value - sums_at_step_.outside[name];
  if (computes_beside()) {
    metrics["idle/trainer_seconds"] = seconds_between(begin, std::max(begin, train_begin_));
    metrics["idle/engine_seconds"] = sums_.engine_idle - sums_at_step_.engine_idle;
    metrics["rollout/buffered_groups"] = static_cast<double>(num_buffered());
    metrics["rollout/running_groups"] = static_cast<double>(num_running());
    metrics["rollout/interrupted_samples"] =
        static_cast<double>(sums_.interrupted - sums_at_step_.interrupted);
    metrics["rollout/recomputed_tokens"] = gained(&EngineStatistics::recomputed_tokens);
  }
  sums_at_step_ = sums_;
  step_begin_.reset();
  has_samples_since_.reset();
}

}  // namespace bough
