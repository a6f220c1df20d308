#include "algo/reward_shaping.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace bough {

void check_finite(std::span<const double> rewards) {
  for (size_t s = 0; s < rewards.size(); ++s)
    if (!std::isfinite(rewards[s]))
      throw UserError(str("reward of sequence ", s, " of ", rewards.size(), " (counted from 0): got ",
                          rewards[s], ", expected a finite number; check the verifier or the rollout file"));
}

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

}  // namespace bough
