// Shapes raw rewards into the rewards that advantages are computed from, in fp64:
//   R = clip((R_raw + overlong penalty + reward_bias) * reward_scaling, -reward_clip, reward_clip)
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/settings.h"

namespace bough {

struct RewardShapingSettings {
  double reward_scaling = 1.0;
  double reward_bias = 0.0;
  double reward_clip = 20.0;
  bool overlong_reward_penalty = false;
  int64_t overlong_tokens = 0;  // L_cache
  double overlong_penalty_factor = 1.0;

  template <class V>
  void visit(V& v) {
    v("reward_scaling", reward_scaling, "factor of every reward, applied after reward_bias");
    v("reward_bias", reward_bias, "added to every reward");
    v("reward_clip", reward_clip, "shaped rewards are clipped to plus or minus this", at_least(0.0));
    v("overlong_reward_penalty", overlong_reward_penalty,
      "DAPO: penalty for responses near the length limit; falls linearly to -overlong_penalty_factor");
    v("overlong_tokens", overlong_tokens, "tokens before the length limit at which the penalty begins",
      at_least(0));
    v("overlong_penalty_factor", overlong_penalty_factor, "largest overlong penalty", at_least(0.0));
  }
};

// Throws UserError if a reward is not finite. The message names the sequence.
void check_finite(std::span<const double> rewards);

// Returns DAPO's soft overlong penalty for a response of `length` tokens: 0 up to max_length - cache, then
// falling linearly to -1 at max_length, and -1 beyond. With cache = 0 it is -1 beyond max_length only.
double overlong_penalty(int64_t length, int64_t max_length, int64_t cache);

// Returns shaped rewards [S]. `response_lengths` [S] and `max_length`, both in tokens, are read only with
// overlong_reward_penalty. Throws UserError if a reward is not finite (the message names the sequence), or if
// overlong_tokens is outside [0, max_length].
std::vector<double> shape_rewards(const RewardShapingSettings& settings, std::span<const double> rewards,
                                  std::span<const int64_t> response_lengths = {}, int64_t max_length = 0);

}  // namespace bough
