#include "algo/advantages.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "algo/groups.h"
#include "base/error.h"

namespace bough {

namespace {

void check_finite(std::span<const double> rewards) {
  for (size_t s = 0; s < rewards.size(); ++s)
    if (!std::isfinite(rewards[s]))
      throw UserError(str("reward of sequence ", s, " of ", rewards.size(), " (counted from 0): got ",
                          rewards[s], ", expected a finite number; check the verifier or the rollout file"));
}

// Rewards of one group in, its advantages out, in place.
using Estimator = void (*)(const AdvantageSettings&, std::vector<double>& values);

double mean_of(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

void grpo(const AdvantageSettings& settings, std::vector<double>& values) {
  if (values.size() == 1) {
    values[0] /= 1.0 + settings.eps;
    return;
  }
  // Asked for exactly: the rounding of a mean of equal numbers would leave noise of 1e-17 / eps.
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  if (*low == *high) {
    std::fill(values.begin(), values.end(), 0.0);
    return;
  }
  const double mean = mean_of(values);
  double squares = 0.0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  const double count = static_cast<double>(values.size()) - (settings.std_unbiased ? 1.0 : 0.0);
  const double scale = 1.0 / (std::sqrt(squares / count) + settings.eps);
  for (double& value : values) value = (value - mean) * scale;
}

void dr_grpo(const AdvantageSettings&, std::vector<double>& values) {
  const double mean = mean_of(values);
  for (double& value : values) value -= mean;
}

void rloo(const AdvantageSettings&, std::vector<double>& values) {
  if (values.size() < 2)
    throw UserError(
        "adv_estimator rloo: a group has one sequence, expected two or more (its baseline is the mean "
        "of the others); raise gconfig.n_samples or choose another estimator");
  const double count = static_cast<double>(values.size());
  const double mean = mean_of(values);
  // R_i - (n mean - R_i)/(n - 1) = (R_i - mean) n/(n - 1)
  for (double& value : values) value = (value - mean) * (count / (count - 1.0));
}

struct NamedEstimator {
  const char* name;
  Estimator estimate;
};
constexpr NamedEstimator kEstimators[] = {{"grpo", grpo}, {"dr_grpo", dr_grpo}, {"rloo", rloo}};

Estimator find_estimator(const std::string& name) {
  const char* names[std::size(kEstimators)];
  for (size_t i = 0; i < std::size(kEstimators); ++i) {
    if (name == kEstimators[i].name) return kEstimators[i].estimate;
    names[i] = kEstimators[i].name;
  }
  const std::string near = nearest(name, std::begin(names), std::end(names));
  throw UserError(str("setting adv_estimator: unknown estimator ", quoted(name),
                      ", expected one of grpo, dr_grpo, rloo",
                      near.empty() ? "" : str("; did you mean '", near, "'?")));
}

}  // namespace

double overlong_penalty(int64_t length, int64_t max_length, int64_t cache) {
  const int64_t over = length - (max_length - cache);
  if (over <= 0) return 0.0;
  return over >= cache ? -1.0 : -static_cast<double>(over) / static_cast<double>(cache);
}

std::vector<double> shape_rewards(const RewardShapingSettings& settings, std::span<const double> rewards,
                                  std::span<const int64_t> response_lengths, int64_t max_length) {
  check_finite(rewards);
  if (settings.overlong_reward_penalty) {
    BOUGH_CHECK(response_lengths.size() == rewards.size(), "lengths ", response_lengths.size(), ", rewards ",
                rewards.size());
    if (settings.overlong_tokens < 0 || settings.overlong_tokens > max_length)
      throw UserError(str("setting overlong_tokens: got ", settings.overlong_tokens, ", expected 0 to ",
                          max_length, " (the largest response length)"));
  }
  std::vector<double> shaped(rewards.begin(), rewards.end());
  for (size_t s = 0; s < shaped.size(); ++s) {
    if (settings.overlong_reward_penalty)
      shaped[s] += settings.overlong_penalty_factor *
                   overlong_penalty(response_lengths[s], max_length, settings.overlong_tokens);
    shaped[s] = std::clamp((shaped[s] + settings.reward_bias) * settings.reward_scaling,
                           -settings.reward_clip, settings.reward_clip);
  }
  return shaped;
}

std::vector<double> compute_advantages(const AdvantageSettings& settings, std::span<const double> rewards,
                                       std::span<const int64_t> groups) {
  BOUGH_CHECK(groups.size() == rewards.size(), "groups ", groups.size(), ", rewards ", rewards.size());
  const Estimator estimate = find_estimator(settings.adv_estimator);
  check_finite(rewards);
  std::vector<double> advantages(rewards.size());
  std::vector<double> values;
  for (const std::vector<int64_t>& members : members_by_group(groups)) {
    values.clear();
    for (const int64_t s : members) values.push_back(rewards[s]);
    estimate(settings, values);
    for (size_t i = 0; i < members.size(); ++i) advantages[members[i]] = values[i];
  }
  return advantages;
}

}  // namespace bough
