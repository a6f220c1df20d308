#include "run/train_batch.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "base/log.h"

namespace bough {

namespace {

// The process's peak resident set so far, in bytes.
int64_t peak_process_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;  // Linux counts in KiB
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

void add_reward_metrics(const TrainOrder& order, MetricValues& metrics) {
  std::vector<double> rewards;    // of the samples that have one
  std::vector<double> baselines;  // of the groups' most likely responses
  std::map<std::string, std::vector<double>> named;
  std::vector<const std::string*> failures;
  size_t samples = 0;
  for (const GroupPointer& group : order.groups) {
    for (size_t i = 0; i < group->samples.size(); ++i) {
      const Trajectory& sample = group->samples[i];
      if (sample.baseline) {
        if (sample.reward) baselines.push_back(*sample.reward);
        continue;
      }
      if (!begins_trajectory(group->samples, i)) continue;
      ++samples;
      if (sample.reward) rewards.push_back(*sample.reward);
      for (const auto& [name, value] : sample.rewards) named[name].push_back(value);
      if (sample.reward_failure) failures.push_back(&*sample.reward_failure);
    }
  }
  if (!failures.empty()) {
    log_warning(str("step ", order.step, ": ", failures.size(), " of ", samples,
                    " rewards failed; the first: ", quoted(*failures.front(), 300)));
  }
  const Moments reward = moments(rewards);
  metrics["reward/mean"] = reward.mean;
  metrics["reward/std"] = reward.deviation;
  if (!baselines.empty()) metrics["reward/baseline_mean"] = moments(baselines).mean;
  metrics["reward/failures"] = static_cast<double>(failures.size());
  for (const auto& [name, list] : named) metrics["reward/" + name + "/mean"] = moments(list).mean;
}

// A group's staleness: the version that the step starts from, minus the version of the group's oldest token.
void add_staleness(const TrainOrder& order, MetricValues& metrics) {
  double total = 0, count = 0;
  int64_t largest = 0;
  for (const GroupPointer& group : order.groups) {
    const std::optional<int64_t> oldest = oldest_version(*group);
    if (!oldest) continue;
    const int64_t staleness = order.step - 1 - *oldest;
    total += static_cast<double>(staleness);
    largest = std::max(largest, staleness);
    count += 1;
  }
  metrics["staleness/mean"] = total / std::max(1.0, count);
  metrics["staleness/max"] = static_cast<double>(largest);
}

}  // namespace

StepRecord train_batch(const TrainOrder& order, const RunSettings& settings, BatchTrainer& trainer) {
  StepRecord record{.step = order.step, .metrics = {}, .batch = {}};
  MetricValues& metrics = record.metrics;
  add_reward_metrics(order, metrics);
  std::map<std::string, int64_t> sampled;
  double total_length = 0, num_samples = 0;
  for (const GroupPointer& group : order.groups) {
    if (group->samples.empty()) continue;
    const int64_t times = ++sampled[group->samples.front().group];
    for (const Trajectory& sample : group->samples) {
      if (!sample.baseline) {
        total_length += static_cast<double>(sample.num_generated());
        ++num_samples;
      }
      record.batch.push_back(sample);
      if (times > 1) record.batch.back().group += str(" (", times, ")");
    }
  }
  std::vector<const Trajectory*> rows;
  for (const Trajectory& row : record.batch)
    if (!row.baseline) rows.push_back(&row);
  metrics.merge(conversation_metrics(rows));  // adds nothing if no row is a conversation
  if (settings.actor.filters.needs_acceptance()) trainer.set_acceptance(record.batch);
  const FilterResult filtered =
      set_advantages(record.batch, settings.actor, settings.gconfig.max_new_tokens,
                     {order.step - 1, settings.rollout.max_age, settings.rollout.max_age_action},
                     [&](std::vector<Trajectory>& batch) { trainer.set_values(batch); });
  add_staleness(order, metrics);
  metrics.merge(age_metrics(record.batch, order.step - 1));
  metrics["age/masked_tokens"] = static_cast<double>(filtered.masked_tokens);
  metrics["age/dropped_groups"] = static_cast<double>(filtered.stale_groups);
  const double samples = std::max(1.0, num_samples);
  metrics["rollout/length_mean"] = total_length / samples;
  metrics["rollout/truncated_fraction"] = static_cast<double>(filtered.truncated) / samples;
  metrics["rollout/zero_std_groups"] = static_cast<double>(filtered.zero_std_groups);
  metrics["rollout/groups_dropped"] = static_cast<double>(filtered.groups_dropped);
  metrics["rollout/surplus_samples"] = static_cast<double>(filtered.surplus_dropped);
  for (const KeptByWidth& kept : filtered.by_width) {
    metrics[str("oversampling/reward_", kept.width)] = kept.reward;
    if (kept.acceptance) metrics[str("oversampling/acceptance_", kept.width)] = *kept.acceptance;
  }
  metrics["rollout/batch_groups"] = static_cast<double>(order.groups.size());
  metrics["rollout/sequences_dropped"] = static_cast<double>(filtered.sequences_dropped);
  trainer.set_version(order.step - 1);
  metrics.merge(trainer.train_step(record.batch));
  metrics["memory/peak"] = static_cast<double>(peak_process_memory());
  return record;
}

}  // namespace bough
