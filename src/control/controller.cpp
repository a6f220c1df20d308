#include "control/controller.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace bough {

namespace {

// The largest resident set of the process since it began, in bytes.
int64_t peak_process_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;  // Linux counts it in KiB
}

struct Moments {
  double mean = 0, deviation = 0;
};

Moments moments(const std::vector<double>& values) {
  if (values.empty()) return {};
  Moments out;
  for (const double value : values) out.mean += value / static_cast<double>(values.size());
  for (const double value : values)
    out.deviation += (value - out.mean) * (value - out.mean) / static_cast<double>(values.size());
  out.deviation = std::sqrt(out.deviation);
  return out;
}

}  // namespace

Controller::Controller(const ControllerParts& parts)
    : parts_(parts),
      order_(parts.problems, static_cast<uint64_t>(parts.settings.seed),
             parts.settings.train_dataset.shuffle),
      gate_(parts.settings.train_dataset.batch_size, parts.settings.rollout.max_head_offpolicyness,
            parts.total_steps),
      worker_({parts.engine, parts.weights, parts.encoder, parts.reward, gate_, buffer_, parts.clock},
              [this] { return next_task(); },
              {.generation = {.sampling = parts.settings.gconfig,
                              .seed = static_cast<uint64_t>(parts.settings.seed),
                              .samples_in_flight = 2 * parts.settings.rollout.max_concurrent_rollouts},
               .own_thread = is_asynchronous(),
               .interruptible = parts.settings.rollout.interruptible,
               .reward_threads = parts.settings.reward_service.workers,
               .min_group = std::min(parts.settings.rollout.min_group, parts.settings.gconfig.n_samples),
               .max_consecutive_failures = parts.settings.reward_service.max_consecutive_failures,
               .on_thread_start = parts.on_engine_thread}) {}

std::optional<GroupTask> Controller::next_task() {
  const std::lock_guard lock(positions_mutex_);
  int64_t position = 0;
  if (again_.empty()) {
    position = next_position_++;
  } else {
    position = again_.front();
    again_.pop_front();
  }
  begun_.insert(position);
  const Problem& problem = parts_.problems[order_.index_at(position)];
  return GroupTask{.id = static_cast<uint64_t>(position), .name = problem.id, .problem = &problem};
}

// Synchronous: a fresh engine, whatever ran before: its cached prompts would change how passes are composed,
// and with it the last bits of the logits.
void Controller::begin_step() {
  if (!is_asynchronous() || published_step_ < 0) publish();
}

// Synchronous: as before the step.
void Controller::abandon_step() {
  worker_.abandon();
  gate_.drop_accepted(buffer_.clear());
  const std::lock_guard lock(positions_mutex_);
  again_.insert(again_.begin(), begun_.begin(), begun_.end());
  begun_.clear();
}

void Controller::publish() {
  parts_.weights.publish(static_cast<int32_t>(num_steps_));
  published_step_ = num_steps_;
  worker_.weights_published();
}

void Controller::while_suspended(const std::function<void()>& work) {
  if (published_step_ != num_steps_) publish();
  worker_.while_suspended(work);
}

// What the batch says of its tokens' age: versions behind the weights that are trained now.
void Controller::tell_rollout(const std::vector<Trajectory>& batch, MetricValues& metrics) const {
  double total = 0;
  int64_t count = 0, largest = 0;
  for (const Trajectory& sample : batch)
    for (size_t i = 0; i < sample.loss_mask.size(); ++i) {
      if (sample.loss_mask[i] == 0) continue;
      const int64_t age = num_steps_ - sample.versions[i];
      total += static_cast<double>(age);
      largest = std::max(largest, age);
      ++count;
    }
  metrics["staleness/mean"] = total / static_cast<double>(std::max<int64_t>(1, count));
  metrics["staleness/max"] = static_cast<double>(largest);
}

void Controller::tell_rewards(const std::vector<FinishedGroup>& groups, MetricValues& metrics) const {
  std::vector<double> rewards;  // of those that could be had
  std::vector<const std::string*> failures;
  int64_t samples = 0;
  for (const FinishedGroup& group : groups) {
    for (const Trajectory& sample : group.samples) {
      ++samples;
      if (sample.reward) rewards.push_back(*sample.reward);
      if (sample.reward_failure) failures.push_back(&*sample.reward_failure);
    }
  }
  if (!failures.empty()) {
    log_warning(str("step ", num_steps_ + 1, ": ", failures.size(), " of ", samples,
                    " rewards failed; the first: ", quoted(*failures.front(), 300)));
  }
  const Moments reward = moments(rewards);
  metrics["reward/mean"] = reward.mean;
  metrics["reward/std"] = reward.deviation;
  metrics["reward/failures"] = static_cast<double>(failures.size());
}

std::vector<Trajectory> Controller::make_batch(std::vector<FinishedGroup> finished,
                                               MetricValues& metrics) const {
  std::vector<Trajectory> batch;
  // A batch across the end of an epoch may have a problem twice: two groups.
  std::map<std::string, int64_t> drawn;
  double total_length = 0;
  for (FinishedGroup& group : finished) {
    for (Trajectory& sample : group.samples) {
      const int64_t times = &sample == &group.samples.front() ? ++drawn[sample.group] : drawn[sample.group];
      total_length += static_cast<double>(sample.num_generated());
      batch.push_back(std::move(sample));
      if (times > 1) batch.back().group += str(" (", times, ")");
    }
  }
  const FilterResult filtered =
      set_advantages(batch, parts_.settings.actor, parts_.settings.gconfig.max_new_tokens,
                     {num_steps_, parts_.settings.rollout.max_age, parts_.settings.rollout.max_age_action});
  metrics.merge(age_metrics(batch, num_steps_));
  metrics["age/masked_tokens"] = static_cast<double>(filtered.masked_tokens);
  metrics["age/dropped_groups"] = static_cast<double>(filtered.stale_groups);
  const auto samples = static_cast<double>(std::max<size_t>(1, batch.size()));
  metrics["rollout/length_mean"] = total_length / samples;
  metrics["rollout/truncated_fraction"] = static_cast<double>(filtered.truncated) / samples;
  metrics["rollout/zero_std_groups"] = static_cast<double>(filtered.zero_std_groups);
  metrics["rollout/groups_dropped"] = static_cast<double>(filtered.groups_dropped);
  metrics["rollout/sequences_dropped"] = static_cast<double>(filtered.sequences_dropped);
  return batch;
}

std::optional<StepRecord> Controller::step(const std::function<bool()>& stop, const Activity& activity) {
  const Clock::Time start = parts_.clock.now();
  const RolloutWorker::Statistics before = worker_.statistics();
  begin_step();
  const int64_t batch_groups = parts_.settings.train_dataset.batch_size;
  const auto waited = worker_.wait_for(batch_groups, stop, [&](int64_t done) {
    if (activity) activity(str("rollout ", done, "/", batch_groups));
  });
  if (!waited.enough || (stop && stop())) {
    if (!is_asynchronous()) abandon_step();
    return std::nullopt;
  }
  const Clock::Time scored_at = parts_.clock.now();

  StepRecord record;
  record.step = num_steps_ + 1;
  MetricValues& metrics = record.metrics;
  if (activity) activity("train");
  std::vector<FinishedGroup> batch = buffer_.take(batch_groups).value();
  {
    const std::lock_guard lock(positions_mutex_);
    for (const FinishedGroup& group : batch) begun_.erase(static_cast<int64_t>(group.id));
    for (const uint64_t id : worker_.take_dropped()) begun_.erase(static_cast<int64_t>(id));
  }
  tell_rewards(batch, metrics);
  record.batch = make_batch(std::move(batch), metrics);
  tell_rollout(record.batch, metrics);
  parts_.trainer.set_version(num_steps_);
  metrics.merge(parts_.trainer.train(record.batch));
  const Clock::Time trained_at = parts_.clock.now();
  ++num_steps_;
  if (num_steps_ % parts_.settings.rollout.weight_sync_steps == 0) publish();
  const Clock::Time end = parts_.clock.now();

  const RolloutWorker::Statistics after = worker_.statistics();
  const double step_seconds = seconds_between(start, end);
  const double rollout_seconds = seconds_between(start, waited.generated_until);
  const auto new_tokens = static_cast<double>(after.engine.new_tokens - before.engine.new_tokens);
  double trained_tokens = 0;
  for (const Trajectory& sample : record.batch)
    if (sample.in_loss()) trained_tokens += static_cast<double>(sample.num_generated());
  metrics["time/rollout"] = rollout_seconds;
  metrics["time/reward"] = seconds_between(waited.generated_until, scored_at);
  metrics["time/publish"] = seconds_between(trained_at, end);
  metrics["time/step"] = step_seconds;
  metrics.try_emplace("time/train", seconds_between(scored_at, trained_at));
  // A synchronous engine generates in its own part of the step only.
  metrics["perf/generated_tokens_per_s"] =
      new_tokens / std::max(1e-9, is_asynchronous() ? step_seconds : rollout_seconds);
  metrics["perf/effective_tokens_per_s"] = trained_tokens / std::max(1e-9, step_seconds);
  metrics["rollout/new_tokens"] = new_tokens;
  metrics["rollout/groups_without_reward"] =
      static_cast<double>(after.dropped_groups - before.dropped_groups);
  metrics["rollout/prefill_tokens"] =
      static_cast<double>(after.engine.prefill_tokens - before.engine.prefill_tokens);
  if (is_asynchronous()) {
    metrics["idle/trainer_seconds"] = seconds_between(start, scored_at);
    metrics["idle/engine_seconds"] = after.idle_seconds - before.idle_seconds;
    metrics["rollout/buffered_groups"] = static_cast<double>(buffer_.size());
    metrics["rollout/interrupted_samples"] =
        static_cast<double>(after.interrupted_samples - before.interrupted_samples);
  }
  metrics["memory/peak"] = static_cast<double>(peak_process_memory());
  return record;
}

Json Controller::save() const {
  // In this order: a group that is finished meanwhile is begun again, and none is lost or there twice.
  const Json buffer = buffer_.save();
  const std::lock_guard lock(positions_mutex_);
  std::set<int64_t> unfinished = begun_;
  for (const Json& group : buffer) unfinished.erase(group.at("id").get<int64_t>());
  unfinished.insert(again_.begin(), again_.end());
  return {{"step", num_steps_},
          {"problems", order_.save()},
          {"buffer", buffer},
          {"next_position", next_position_},
          {"unfinished", unfinished}};
}

void Controller::restore(const Json& state) {
  const std::lock_guard lock(positions_mutex_);
  order_.restore(state.at("problems"));
  num_steps_ = state.at("step").get<int64_t>();
  if (state.contains("buffer")) buffer_.restore(state.at("buffer"));
  gate_.restore(num_steps_, buffer_.size());
  next_position_ = state.value("next_position", gate_.counts().accepted);
  const auto unfinished = state.value("unfinished", std::vector<int64_t>());
  again_.assign(unfinished.begin(), unfinished.end());
  begun_.clear();
  if (state.contains("buffer"))
    for (const Json& group : state.at("buffer")) begun_.insert(group.at("id").get<int64_t>());
}

}  // namespace bough
