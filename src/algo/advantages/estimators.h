// The list of advantage estimators. To add one, write a file in this folder that defines NAME_estimator(),
// with its equation and source at the top, and add a line to the list below.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "algo/advantages.h"

namespace bough {

// For each sequence a list of one number, or of one number per trained token.
using Advantages = std::vector<std::vector<double>>;

struct EstimatorInput {
  const AdvantageSettings& settings;
  const AdvantageInput& batch;
  const std::vector<std::vector<int64_t>>& groups;  // the sequence indices of each group
  Advantages* returns = nullptr;                    // output, nullptr if the caller does not need it

  // Calls `estimate` for each group and returns the results by sequence. `estimate` gets the group's rewards
  // in `values` and replaces them in place. `tokens`: the number of trained tokens of each sequence of the
  // group.
  using Estimate = void (*)(const AdvantageSettings&, std::vector<double>& values,
                            const std::vector<int64_t>& tokens);
  std::vector<double> by_group(std::span<const double> rewards, Estimate estimate) const;
};

struct EstimatorKind {
  Advantages (*estimate)(const EstimatorInput& input) = nullptr;
  bool needs_values = false;      // SequenceSteps::values
  bool needs_steps = false;       // AdvantageInput::steps
  bool needs_baselines = false;   // AdvantageInput::baselines
  bool takes_kl_rewards = false;  // AdvantageInput::kl_rewards
};

// The values of AdvantageSettings::adv_estimator, see docs/algorithms.md.
#define BOUGH_ADVANTAGES(X)       \
  X(grpo)                         \
  X(dr_grpo)                      \
  X(rloo)                         \
  X(reinforce_plus_plus)          \
  X(reinforce_plus_plus_baseline) \
  X(opo)                          \
  X(remax)                        \
  X(maxrl)                        \
  X(gdpo)                         \
  X(gae)                          \
  X(turn_returns)

#define BOUGH_DECLARE_ESTIMATOR(name) EstimatorKind name##_estimator();
BOUGH_ADVANTAGES(BOUGH_DECLARE_ESTIMATOR)
#undef BOUGH_DECLARE_ESTIMATOR

double mean_of(std::span<const double> values);  // 0 without values
// Returns the standard deviation; 0 for a single value. Equal values give exactly 0: a rounding error of
// their mean would become noise when it is divided by eps.
double deviation_of(std::span<const double> values, bool unbiased);
// Replaces rewards R by (R - mean) / (std + eps), in a group of one by R / (1 + eps).
void normalize_group(const AdvantageSettings& settings, std::vector<double>& values,
                     const std::vector<int64_t>& tokens);
// Converts one number per sequence to lists of one number.
Advantages one_a_sequence(const std::vector<double>& values);
// Replaces A by (A - mean) / sqrt(var + 1e-8), where mean and unbiased var are over all trained tokens of the
// batch. A sequence with a single number counts as `tokens` equal numbers. `parts` can turn off the
// subtraction or the division.
struct Whitening {
  bool subtracts_mean = true, divides_by_deviation = true;
};
void whiten(Advantages& advantages, std::span<const int64_t> tokens, Whitening parts = {});
// The whitening that adv_norm selects. `by_default`: whether `auto` turns on subtraction and division.
Whitening whitening(const AdvantageNormSettings& settings, bool by_default);

}  // namespace bough
