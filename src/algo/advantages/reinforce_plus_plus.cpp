// REINFORCE++ (Hu 2025): returns per token, with R at the last token and discounted from there back:
//   A_t = discount^(n - 1 - t) R,
// whitened over all trained tokens of the batch. Baseline form: A = R - mean_g on every token, without a
// discount, whitened in the same way. Neither form has a KL penalty in the reward.
#include "algo/advantages/estimators.h"

namespace bough {

EstimatorKind reinforce_plus_plus_estimator() {
  return {[](const EstimatorInput& input) {
    Advantages advantages;
    for (size_t s = 0; s < input.batch.rewards.size(); ++s) {
      std::vector<double> returns(
          input.settings.discount == 1.0 ? 1 : static_cast<size_t>(input.batch.tokens[s]),
          input.batch.rewards[s]);
      for (size_t t = returns.size(); t-- > 1;) returns[t - 1] = returns[t] * input.settings.discount;
      advantages.push_back(std::move(returns));
    }
    whiten(advantages, input.batch.tokens);
    return advantages;
  }};
}

EstimatorKind reinforce_plus_plus_baseline_estimator() {
  return {[](const EstimatorInput& input) {
    Advantages advantages = dr_grpo_estimator().estimate(input);
    whiten(advantages, input.batch.tokens);
    return advantages;
  }};
}

}  // namespace bough
