// Rewards to advantages, one number a sequence. Pure functions of the batch; everything in fp64.
//   shaped  R = clip((R_raw + overlong penalty + bias) * scaling, -reward_clip, reward_clip)
//   grpo    A_i = (R_i - mean_g) / (std_g + eps); equal rewards: 0; a group of one: R / (1 + eps), as in verl
//   dr_grpo A_i = R_i - mean_g                        (to be aggregated by constant_length)
//   rloo    A_i = R_i - mean of the other n - 1       (a group of one is an error)
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/settings.h"

namespace bough {

struct AdvantageSettings {
  std::string adv_estimator = "grpo";
  bool std_unbiased = true;
  double eps = 1e-6;

  template <class V>
  void visit(V& v) {
    v("adv_estimator", adv_estimator, "how rewards become advantages", one_of({"grpo", "dr_grpo", "rloo"}));
    v("std_unbiased", std_unbiased, "grpo: divide by n - 1, not n, inside the standard deviation");
    v("eps", eps, "grpo: added to the standard deviation", range(0.0, 1.0));
  }
};

struct RewardShapingSettings {
  double reward_scaling = 1.0;
  double reward_bias = 0.0;
  double reward_clip = 20.0;
  bool overlong_reward_penalty = false;
  int64_t overlong_tokens = 0;  // L_cache
  double overlong_penalty_factor = 1.0;

  template <class V>
  void visit(V& v) {
    v("reward_scaling", reward_scaling, "rewards are multiplied by this after the bias");
    v("reward_bias", reward_bias, "added to every reward");
    v("reward_clip", reward_clip, "shaped rewards are cut to plus or minus this", at_least(0.0));
    v("overlong_reward_penalty", overlong_reward_penalty,
      "DAPO: responses near the length limit lose reward, linearly down to -overlong_penalty_factor");
    v("overlong_tokens", overlong_tokens, "tokens before the limit at which that begins", at_least(0));
    v("overlong_penalty_factor", overlong_penalty_factor, "the largest such loss", at_least(0.0));
  }
};

// DAPO's soft overlong penalty of a response of `length` tokens: 0 up to max_length - cache, then linear to
// -1 at max_length and beyond. cache = 0: -1 beyond max_length only.
double overlong_penalty(int64_t length, int64_t max_length, int64_t cache);

// Shaped rewards [S]. `response_lengths` [S] and `max_length` (tokens a response may have) are read only with
// overlong_reward_penalty. UserError: a reward that is not finite (names the sequence), or overlong_tokens
// outside [0, max_length].
std::vector<double> shape_rewards(const RewardShapingSettings& settings, std::span<const double> rewards,
                                  std::span<const int64_t> response_lengths = {}, int64_t max_length = 0);

// Advantages [S] of (shaped) rewards [S]; sequences with equal groups[s] were sampled for one prompt and may
// stand anywhere. UserError: a reward that is not finite (names the sequence); an unknown estimator; rloo
// with a group of one.
std::vector<double> compute_advantages(const AdvantageSettings& settings, std::span<const double> rewards,
                                       std::span<const int64_t> groups);

}  // namespace bough
