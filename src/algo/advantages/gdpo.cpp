// GDPO (group reward-decoupled normalization, 2026): each of a sample's several rewards is normalized inside
// its group separately. A reward of large spread thus does not dominate the others. The weighted sum is
// whitened over the batch's trained tokens:
//   A = whiten(sum over k of w_k GRPO(R_k)).
#include "algo/advantages/estimators.h"
#include "base/error.h"

namespace bough {

namespace {

Advantages gdpo(const EstimatorInput& input) {
  const auto& parts = input.batch.parts;
  const auto& weights = input.settings.gdpo_weights;
  const size_t count = input.batch.rewards.size(), num_parts = parts.empty() ? 0 : parts.front().size();
  if (num_parts == 0 && count > 0)
    throw UserError(
        "adv_estimator gdpo: samples have no named `rewards`; expected several named rewards per sample, or "
        "another estimator");
  if (!weights.empty() && weights.size() != num_parts && count > 0)
    throw UserError(str("setting gdpo_weights: got ", weights.size(), " weights, but a sample has ",
                        num_parts, " rewards; expected one weight for each reward"));
  std::vector<double> sum(count, 0.0), own(count);
  for (size_t k = 0; k < num_parts; ++k) {
    for (size_t s = 0; s < count; ++s) {
      if (parts[s].size() != num_parts)
        throw UserError(str("adv_estimator gdpo: a sample has ", parts[s].size(), " rewards, expected ",
                            num_parts, " as in the first sample"));
      own[s] = parts[s][k];
    }
    const std::vector<double> normalized = input.by_group(own, normalize_group);
    for (size_t s = 0; s < count; ++s) sum[s] += (weights.empty() ? 1.0 : weights[k]) * normalized[s];
  }
  Advantages advantages = one_a_sequence(sum);
  whiten(advantages, input.batch.tokens);
  return advantages;
}

}  // namespace

EstimatorKind gdpo_estimator() {
  return {gdpo};
}

}  // namespace bough
