// GRPO (Shao et al. 2024, DeepSeekMath): A = (R - mean_g) / (std_g + eps). Equal rewards give 0. A group of
// one gives R / (1 + eps), as in verl (AReaL, TRL: 0).
// Dr.GRPO (Liu et al. 2025): A = R - mean_g, for aggregation by constant_length.
// AReaL's mean_level and std_level set what the mean and the deviation are taken over: the group, the batch
// (one reward per sequence), or nothing. If mean_level or std_level is set, a deviation of 0 counts as 1. The
// deviation of a single reward also counts as 1.
#include "algo/advantages/estimators.h"

namespace bough {

namespace {

void subtract_mean(const AdvantageSettings&, std::vector<double>& values, const std::vector<int64_t>&) {
  const double mean = mean_of(values);
  for (double& value : values) value -= mean;
}

void to_mean(const AdvantageSettings&, std::vector<double>& values, const std::vector<int64_t>&) {
  values.assign(values.size(), mean_of(values));
}

void to_deviation(const AdvantageSettings& settings, std::vector<double>& values,
                  const std::vector<int64_t>&) {
  values.assign(values.size(), deviation_of(values, settings.std_unbiased));
}

Advantages by_levels(const EstimatorInput& input) {
  const AdvantageSettings& settings = input.settings;
  const std::span<const double> rewards = input.batch.rewards;
  const std::string mean_level = settings.mean_level == "auto" ? "group" : settings.mean_level;
  const std::string std_level = settings.std_level == "auto" ? "group" : settings.std_level;
  std::vector<double> means(rewards.size(), mean_level == "batch" ? mean_of(rewards) : 0.0);
  std::vector<double> deviations(rewards.size(),
                                 std_level == "batch" ? deviation_of(rewards, settings.std_unbiased) : 0.0);
  if (mean_level == "group") means = input.by_group(rewards, to_mean);
  if (std_level == "group") deviations = input.by_group(rewards, to_deviation);
  std::vector<double> out;
  for (size_t s = 0; s < rewards.size(); ++s)
    out.push_back((rewards[s] - means[s]) /
                  (std_level == "none" ? 1.0 : (deviations[s] == 0.0 ? 1.0 : deviations[s]) + settings.eps));
  return one_a_sequence(out);
}

}  // namespace

EstimatorKind grpo_estimator() {
  return {[](const EstimatorInput& input) {
    if (input.settings.mean_level != "auto" || input.settings.std_level != "auto") return by_levels(input);
    return one_a_sequence(input.by_group(input.batch.rewards, normalize_group));
  }};
}

EstimatorKind dr_grpo_estimator() {
  return {[](const EstimatorInput& input) {
    return one_a_sequence(input.by_group(input.batch.rewards, subtract_mean));
  }};
}

}  // namespace bough
