// The estimators by name: rewards of a batch to advantages. Adding one: a file in this folder that defines
// NAME_estimator(), with its equation and source at the top, and a line in the list below.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "algo/advantages.h"

namespace bough {

// One number a sequence, or one a trained token of it.
using Advantages = std::vector<std::vector<double>>;

struct EstimatorInput {
  const AdvantageSettings& settings;
  const AdvantageInput& batch;
  const std::vector<std::vector<int64_t>>& groups;  // the sequences of each group
  Advantages* returns = nullptr;                    // where the caller wants them

  // By sequence: `estimate` of the rewards of each group, in place. The last argument: the same sequences'
  // trained tokens.
  using Estimate = void (*)(const AdvantageSettings&, std::vector<double>& values,
                            const std::vector<int64_t>& tokens);
  std::vector<double> by_group(std::span<const double> rewards, Estimate estimate) const;
};

struct EstimatorKind {
  Advantages (*estimate)(const EstimatorInput& input) = nullptr;
  bool needs_values = false;     // of a critic
  bool needs_steps = false;      // AdvantageInput::steps
  bool needs_baselines = false;  // AdvantageInput::baselines
};

// Every name: AdvantageSettings::adv_estimator, docs/algorithms.md.
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

// What estimators share.
double mean_of(std::span<const double> values);
// Of equal values exactly 0: the rounding of their mean would leave noise of 1e-17 / eps. 0 for one value.
double deviation_of(std::span<const double> values, bool unbiased);
// (R - mean_g) / (std_g + eps), a group of one: R / (1 + eps).
void normalize_group(const AdvantageSettings& settings, std::vector<double>& values,
                     const std::vector<int64_t>& tokens);
Advantages one_a_sequence(const std::vector<double>& values);
// (A - mean) / sqrt(var + 1e-8) over all trained tokens of the batch, var unbiased; a single number counts
// once for each of the sequence's trained tokens. Either part may be left out.
struct Whitening {
  bool subtracts_mean = true, divides_by_deviation = true;
};
void whiten(Advantages& advantages, std::span<const int64_t> tokens, Whitening parts = {});
// What adv_norm asks for; `by_default`: what auto stands for.
Whitening whitening(const AdvantageNormSettings& settings, bool by_default);

}  // namespace bough
