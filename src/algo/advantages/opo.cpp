// OPO (Hao et al. 2025): the baseline of least variance if the norm of a sequence's gradient grows with its
// length: A = R - sum(l R) / sum(l) over the group. l is a sequence's number of trained tokens. A group of
// one has baseline 0.
// ReMax (Li et al. 2023, arXiv 2310.10505): A = R - R(greedy), with R(greedy) the reward of the prompt's most
// likely response. This response is generated in addition to the group and is not trained. R(greedy) does not
// depend on the samples, so groups of one have a baseline.
// MaxRL (2026): A = (R - mean_g) / (mean_g + eps). A mean of at most eps gives 0.
#include "algo/advantages/estimators.h"

namespace bough {

namespace {

void opo(const AdvantageSettings&, std::vector<double>& values, const std::vector<int64_t>& tokens) {
  if (values.size() < 2) return;
  double weighted = 0, total = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    weighted += static_cast<double>(tokens[i]) * values[i];
    total += static_cast<double>(tokens[i]);
  }
  const double baseline = total > 0 ? weighted / total : 0.0;
  for (double& value : values) value -= baseline;
}

void maxrl(const AdvantageSettings& settings, std::vector<double>& values, const std::vector<int64_t>&) {
  const double mean = mean_of(values);
  for (double& value : values) value = mean <= settings.eps ? 0.0 : (value - mean) / (mean + settings.eps);
}

}  // namespace

EstimatorKind opo_estimator() {
  return {
      [](const EstimatorInput& input) { return one_a_sequence(input.by_group(input.batch.rewards, opo)); }};
}

EstimatorKind remax_estimator() {
  const auto estimate = [](const EstimatorInput& input) {
    std::vector<double> advantages;
    for (size_t s = 0; s < input.batch.rewards.size(); ++s)
      advantages.push_back(input.batch.rewards[s] - input.batch.baselines[s]);
    return one_a_sequence(advantages);
  };
  return {.estimate = estimate, .needs_baselines = true};
}

EstimatorKind maxrl_estimator() {
  return {
      [](const EstimatorInput& input) { return one_a_sequence(input.by_group(input.batch.rewards, maxrl)); }};
}

}  // namespace bough
