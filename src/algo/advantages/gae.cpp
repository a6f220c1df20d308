#include "algo/advantages/gae.h"

#include <cmath>

#include "algo/advantages/estimators.h"
#include "base/error.h"

namespace bough {

GaeResult gae(const GaeInput& input, double gamma, double lambda) {
  const size_t count = input.values.size();
  BOUGH_CHECK(input.rewards.size() == count && input.trained.size() == count &&
                  (input.turns.empty() || input.turns.size() == count),
              "values ", count, ", rewards ", input.rewards.size(), ", mask ", input.trained.size(),
              ", turns ", input.turns.size());
  // The trained tokens of each time step, in order.
  std::vector<std::vector<size_t>> steps;
  for (size_t t = 0; t < count; ++t) {
    if (!input.trained[t]) continue;
    const bool goes_on =
        !steps.empty() && !input.turns.empty() && input.turns[steps.back().back()] == input.turns[t];
    if (!goes_on) steps.emplace_back();
    steps.back().push_back(t);
  }
  GaeResult result{std::vector<double>(count, 0.0), {input.values.begin(), input.values.end()}};
  double next_value = 0, next_advantage = 0;
  if (input.truncated && !steps.empty()) next_value = input.values[steps.back().back()];
  for (size_t k = steps.size(); k-- > 0;) {
    const double value = input.values[steps[k].front()];
    double reward = 0;
    for (const size_t t : steps[k]) reward += input.rewards[t];
    next_advantage = reward + gamma * next_value - value + gamma * lambda * next_advantage;
    next_value = value;
    for (const size_t t : steps[k]) {
      result.advantages[t] = next_advantage;
      result.returns[t] = next_advantage + value;
    }
  }
  return result;
}

EstimatorKind gae_estimator() {
  const auto estimate = [](const EstimatorInput& input) {
    const AdvantageSettings& settings = input.settings;
    const bool by_turn = settings.gae_timestep_unit == "turn";
    Advantages advantages;
    for (size_t s = 0; s < input.batch.steps.size(); ++s) {
      const SequenceSteps& steps = input.batch.steps[s];
      for (const double value : steps.values)
        if (!std::isfinite(value))
          throw UserError(str("adv_estimator gae: the critic's value of a token in sequence ", s + 1, " is ",
                              value,
                              ", expected a finite number; lower critic.optimizer.lr, and resume from "
                              "a checkpoint before the critic diverged"));
      const std::vector<uint8_t> trained(steps.values.size(), 1);
      const std::vector<int32_t> none;
      std::vector<double> rewards = steps.rewards;
      if (!input.batch.kl_rewards.empty())
        for (size_t t = 0; t < rewards.size(); ++t) rewards[t] += input.batch.kl_rewards[s].at(t);
      GaeResult own = gae({rewards, steps.values, trained, by_turn ? steps.turns : none,
                           steps.truncated && settings.bootstrap_truncated},
                          settings.discount, settings.gae_lambda);
      advantages.push_back(std::move(own.advantages));
      if (input.returns) input.returns->push_back(std::move(own.returns));
    }
    whiten(advantages, input.batch.tokens, whitening(settings.adv_norm, /*by_default=*/true));
    return advantages;
  };
  return {.estimate = estimate, .needs_values = true, .needs_steps = true, .takes_kl_rewards = true};
}

EstimatorKind turn_returns_estimator() {
  const auto estimate = [](const EstimatorInput& input) {
    Advantages advantages;
    for (const SequenceSteps& steps : input.batch.steps) {
      const std::vector<double> zeros(steps.rewards.size(), 0.0);
      const std::vector<uint8_t> trained(steps.rewards.size(), 1);
      advantages.push_back(
          gae({steps.rewards, zeros, trained, steps.turns}, input.settings.turn_discount, 1.0).advantages);
    }
    whiten(advantages, input.batch.tokens, whitening(input.settings.adv_norm, /*by_default=*/false));
    return advantages;
  };
  return {.estimate = estimate, .needs_steps = true};
}

}  // namespace bough
