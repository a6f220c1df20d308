#include "control/evaluation.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/random.h"

namespace bough {

Interval wilson_interval(double rate, int64_t n) {
  BOUGH_CHECK(n >= 1 && rate >= 0 && rate <= 1, "rate ", rate, ", n ", n);
  constexpr double z = 1.959963984540054;  // 97.5% of the normal distribution lie below z
  const auto trials = static_cast<double>(n);
  const double scale = 1 / (1 + z * z / trials);
  const double center = (rate + z * z / (2 * trials)) * scale;
  const double half = z * std::sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) * scale;
  return {std::max(0.0, center - half), std::min(1.0, center + half)};
}

MetricValues to_metrics(const EvaluationResult& result, const std::string& name) {
  return {{name + "/avg_at_k", result.avg_at_k},
          {name + "/avg_at_k_low", result.interval.low},
          {name + "/avg_at_k_high", result.interval.high},
          {name + "/pass_at_k", result.pass_at_k},
          {name + "/reward_mean", result.reward_mean},
          {name + "/length_mean", result.length_mean},
          {name + "/truncated_fraction", result.truncated_fraction},
          {"time/" + name, result.seconds}};
}

Json to_json(const EvaluationResult& result) {
  return {{"num_problems", result.num_problems},
          {"k", result.k},
          {"avg_at_k", result.avg_at_k},
          {"pass_at_k", result.pass_at_k},
          {"interval", {result.interval.low, result.interval.high}},
          {"reward_mean", result.reward_mean},
          {"length_mean", result.length_mean},
          {"truncated_fraction", result.truncated_fraction},
          {"reward_failures", result.failures},
          {"new_tokens", result.new_tokens},
          {"seconds", result.seconds}};
}

std::string describe(const EvaluationResult& result) {
  char buffer[128];
  std::snprintf(buffer, sizeof buffer, "%.1f%% (95%%: %.1f to %.1f) of %lld problems", 100 * result.avg_at_k,
                100 * result.interval.low, 100 * result.interval.high,
                static_cast<long long>(result.num_problems));
  return buffer;
}

std::optional<EvaluationResult> evaluate(Engine& engine, const Dataset& dataset, const TextCodec& codec,
                                         RewardFunction& reward, const EvaluationOptions& options) {
  BOUGH_CHECK(dataset.size() > 0, "the evaluation dataset is empty");
  const Clock::Time start = SteadyClock().now();
  // A separate stream: with training's seed, equal ids would give the same random numbers.
  const uint64_t seed = CounterRandom(options.seed, Purpose::evaluation).bits(0, 0);
  DatasetTasks tasks(dataset);
  Generator generator({engine, &codec, options.environment, options.conversations}, tasks,
                      {.sampling = options.sampling,
                       .seed = seed,
                       .samples_in_flight = options.samples_in_flight,
                       .in_rounds = options.in_rounds});
  auto groups = generator.collect(static_cast<int64_t>(dataset.size()), options.collect);
  if (!groups) return std::nullopt;
  const std::vector<RewardResult> rewards = score(*groups, reward);
  auto result = rewards.begin();
  for (FinishedGroup& group : *groups)
    for (Trajectory& sample : group.samples) set_reward(sample, *result++);

  EvaluationResult out;
  out.num_problems = static_cast<int64_t>(dataset.size());
  out.k = options.sampling.n_samples;
  for (const FinishedGroup& group : *groups) {
    int64_t right = 0;
    for (size_t i = 0; i < group.samples.size(); ++i) {
      const Trajectory& sample = group.samples[i];
      // Accuracy is the mean over all samples of all problems. A sample without a reward counts as wrong.
      const double reward = sample.reward.value_or(0);
      out.new_tokens += sample.num_generated();
      if (!begins_trajectory(group.samples, i)) continue;
      right += reward >= kRightReward;
      out.reward_mean += reward;
      out.failures += sample.reward_failure.has_value();
      out.truncated_fraction += sample.finish_reason == finish_reason_name(FinishReason::kLength);
    }
    out.avg_at_k += static_cast<double>(right);
    out.pass_at_k += right > 0;
  }
  const auto samples = static_cast<double>(out.num_problems * out.k);
  out.avg_at_k /= samples;
  out.reward_mean /= samples;
  out.truncated_fraction /= samples;
  out.length_mean = static_cast<double>(out.new_tokens) / samples;
  out.pass_at_k /= static_cast<double>(out.num_problems);
  out.interval = wilson_interval(out.avg_at_k, out.num_problems);
  out.seconds = seconds_since(start);
  if (options.take_samples) {
    std::vector<Trajectory> samples;
    for (FinishedGroup& group : *groups)
      std::move(group.samples.begin(), group.samples.end(), std::back_inserter(samples));
    options.take_samples(std::move(samples));
  }
  return out;
}

}  // namespace bough
