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

constexpr int64_t kMaxStaleness = 0;  // eta: synchronous

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
      gate_(parts.settings.train_dataset.batch_size, kMaxStaleness),
      generator_({parts.engine, &parts.encoder, &parts.reward, &gate_}, [this] { return next_task(); },
                 {.sampling = parts.settings.gconfig,
                  .seed = static_cast<uint64_t>(parts.settings.seed),
                  .samples_in_flight = 2 * parts.settings.rollout.max_concurrent_rollouts}) {}

std::optional<GroupTask> Controller::next_task() {
  const int64_t position = next_position_++;
  const Problem& problem = parts_.problems[order_.index_at(position)];
  return GroupTask{.id = static_cast<uint64_t>(position), .name = problem.id, .problem = &problem};
}

// Nothing is in flight when a step begins; an abandoned step's groups are begun again.
void Controller::begin_step() {
  gate_.restore(num_steps_, buffer_.size());
  next_position_ = gate_.counts().accepted;
}

void Controller::publish() {
  parts_.engine.update_weights({.version = static_cast<int32_t>(num_steps_), .model = parts_.model});
  gate_.set_version(num_steps_);
}

void Controller::tell_rewards(const std::vector<FinishedGroup>& groups, MetricValues& metrics) const {
  std::vector<double> rewards;
  std::vector<const std::string*> failures;
  for (const FinishedGroup& group : groups) {
    for (const Trajectory& sample : group.samples) {
      rewards.push_back(sample.reward.value());
      if (sample.reward_failure) failures.push_back(&*sample.reward_failure);
    }
  }
  if (!failures.empty()) {
    log_warning(str("step ", num_steps_ + 1, ": ", failures.size(), " of ", rewards.size(),
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
      set_advantages(batch, parts_.settings.actor, parts_.settings.gconfig.max_new_tokens);
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
  begin_step();
  // A fresh engine, whatever ran before: its cached prompts would change how passes are composed, and with it
  // the last bits of the logits.
  publish();
  const EngineStatistics before = parts_.engine.statistics();
  CollectOptions collect{.stop = stop};
  if (activity) {
    collect.on_progress = [&](int64_t done, int64_t total) { activity(str("rollout ", done, "/", total)); };
  }
  const int64_t batch_groups = parts_.settings.train_dataset.batch_size;
  auto groups = generator_.collect(batch_groups - buffer_.size(), collect);
  if (!groups) return std::nullopt;
  const EngineStatistics after = parts_.engine.statistics();
  const Clock::Time sampled_at = parts_.clock.now();

  StepRecord record;
  record.step = num_steps_ + 1;
  if (activity) activity("reward");
  generator_.score(*groups);
  const Clock::Time scored_at = parts_.clock.now();
  if (stop && stop()) return std::nullopt;

  if (activity) activity("train");
  for (FinishedGroup& group : *groups) buffer_.put(std::move(group));
  std::vector<FinishedGroup> batch = buffer_.take(batch_groups).value();
  tell_rewards(batch, record.metrics);
  record.batch = make_batch(std::move(batch), record.metrics);
  record.metrics.merge(parts_.trainer.train(record.batch));
  const Clock::Time trained_at = parts_.clock.now();
  ++num_steps_;
  publish();
  const Clock::Time end = parts_.clock.now();

  MetricValues& metrics = record.metrics;
  metrics["staleness/mean"] = 0;  // every token was sampled by the weights that it trains
  metrics["staleness/max"] = 0;
  metrics["time/rollout"] = seconds_between(start, sampled_at);
  metrics["time/reward"] = seconds_between(sampled_at, scored_at);
  metrics["time/publish"] = seconds_between(trained_at, end);
  metrics["time/step"] = seconds_between(start, end);
  metrics.try_emplace("time/train", seconds_between(scored_at, trained_at));
  metrics["perf/generated_tokens_per_s"] = static_cast<double>(after.new_tokens - before.new_tokens) /
                                           std::max(1e-9, seconds_between(start, sampled_at));
  metrics["rollout/new_tokens"] = static_cast<double>(after.new_tokens - before.new_tokens);
  metrics["rollout/prefill_tokens"] = static_cast<double>(after.prefill_tokens - before.prefill_tokens);
  metrics["memory/peak"] = static_cast<double>(peak_process_memory());
  return record;
}

Json Controller::save() const {
  return {{"step", num_steps_}, {"problems", order_.save()}, {"buffer", buffer_.save()}};
}

void Controller::restore(const Json& state) {
  order_.restore(state.at("problems"));
  num_steps_ = state.at("step").get<int64_t>();
  if (state.contains("buffer")) buffer_.restore(state.at("buffer"));
  gate_.restore(num_steps_, buffer_.size());
}

}  // namespace bough
