#include "run/train_batch.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "base/log.h"

namespace bough {

namespace {

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

void add_reward_metrics(const std::vector<Trajectory>& batch, int64_t step, MetricValues& metrics) {
  std::vector<double> rewards;    // of the samples that have one
  std::vector<double> baselines;  // of the groups' most likely responses
  std::map<std::string, std::vector<double>> named;
  std::vector<const std::string*> failures;
  size_t samples = 0;
  for (size_t i = 0; i < batch.size(); ++i) {
    const Trajectory& row = batch[i];
    if (row.baseline) {
      if (row.reward) baselines.push_back(*row.reward);
      continue;
    }
    if (!begins_trajectory(batch, i)) continue;
    ++samples;
    if (row.reward) rewards.push_back(*row.reward);
    for (const auto& [name, value] : row.rewards) named[name].push_back(value);
    if (row.reward_failure) failures.push_back(&*row.reward_failure);
  }
  if (!failures.empty()) {
    log_warning(str("step ", step, ": ", failures.size(), " of ", samples,
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
  for (const ScoredGroup& scored : order.groups) {
    const std::optional<int64_t> oldest = oldest_version(*scored.group);
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
  std::map<std::string, int64_t> sampled;
  for (const ScoredGroup& scored : order.groups) {
    std::vector<Trajectory> group = scored.rows();
    if (group.empty()) continue;
    const int64_t times = ++sampled[group.front().group];
    for (Trajectory& row : group) {
      if (times > 1) row.group += str(" (", times, ")");
      record.batch.push_back(std::move(row));
    }
  }
  add_reward_metrics(record.batch, order.step, metrics);
  std::vector<const Trajectory*> rows;
  double total_length = 0;
  for (const Trajectory& row : record.batch) {
    if (row.baseline) continue;
    rows.push_back(&row);
    total_length += static_cast<double>(row.num_generated());
  }
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
  const double samples = std::max(1.0, static_cast<double>(rows.size()));
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
  trainer.set_token_values(record.batch);
  metrics["memory/peak"] = static_cast<double>(trainer.peak_bytes());
  return record;
}

}  // namespace bough
