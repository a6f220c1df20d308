// REINFORCE++ (Hu 2025): returns per token, with R at the last token and discounted from there back:
//   A_t = r_t + discount A_(t+1)
// r_t is R at the last token and 0 before, plus the KL's reward of the token (kl_ctl). A is whitened over all
// trained tokens of the batch. Baseline form: A = R - mean_g on every token, without a discount and without a
// KL in the reward, whitened in the same way.
#include "algo/advantages/estimators.h"

namespace bough {

EstimatorKind reinforce_plus_plus_estimator() {
  const auto estimate = [](const EstimatorInput& input) {
    const AdvantageInput& batch = input.batch;
    const bool has_kl = !batch.kl_rewards.empty();
    Advantages advantages;
    for (size_t s = 0; s < batch.rewards.size(); ++s) {
      // Without discount and KL, all tokens have the same return.
      const bool is_constant = input.settings.discount == 1.0 && !has_kl;
      std::vector<double> returns(is_constant ? 1 : static_cast<size_t>(batch.tokens[s]), batch.rewards[s]);
      if (has_kl && !returns.empty()) returns.back() += batch.kl_rewards[s].at(returns.size() - 1);
      for (size_t t = returns.size(); t-- > 1;)
        returns[t - 1] = returns[t] * input.settings.discount + (has_kl ? batch.kl_rewards[s][t - 1] : 0.0);
      advantages.push_back(std::move(returns));
    }
    whiten(advantages, batch.tokens);
    return advantages;
  };
  return {.estimate = estimate, .takes_kl_rewards = true};
}

EstimatorKind reinforce_plus_plus_baseline_estimator() {
  return {[](const EstimatorInput& input) {
    Advantages advantages = dr_grpo_estimator().estimate(input);
    whiten(advantages, input.batch.tokens);
    return advantages;
  }};
}

}  // namespace bough
