// Computes advantages from rewards, in fp64. All functions are pure. advantages/ has one file per estimator,
// with its equation.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/settings.h"

namespace bough {

// All estimators, the valid values of adv_estimator.
std::vector<std::string> estimator_names();

// AReaL's adv_norm. auto means batch for gae and none for turn_returns. No other estimator uses adv_norm.
struct AdvantageNormSettings {
  std::string mean_level = "auto";
  std::string std_level = "auto";

  template <class V>
  void visit(V& v) {
    v("mean_level", mean_level, "mean that is subtracted; auto: batch for gae, none for turn_returns",
      one_of({"auto", "batch", "none"}));
    v("std_level", std_level, "standard deviation to divide by; auto: batch for gae, none for turn_returns",
      one_of({"auto", "batch", "none"}));
  }
};

struct AdvantageSettings {
  std::string adv_estimator = "grpo";
  bool std_unbiased = true;
  double eps = 1e-6;
  std::string mean_level = "auto";
  std::string std_level = "auto";
  double discount = 1.0;
  double gae_lambda = 1.0;
  std::string gae_timestep_unit = "token";
  bool bootstrap_truncated = false;
  double turn_discount = 1.0;
  AdvantageNormSettings adv_norm;
  std::vector<double> gdpo_weights;

  template <class V>
  void visit(V& v) {
    const std::vector<std::string> names = estimator_names();
    v("adv_estimator", adv_estimator, "estimator that computes advantages from rewards",
      one_of({names.begin(), names.end()}));
    v("std_unbiased", std_unbiased, "grpo, gdpo: divide by n - 1, not n, inside the standard deviation");
    v("eps", eps, "grpo, gdpo: added to the standard deviation; maxrl: to the mean", range(0.0, 1.0));
    v("mean_level", mean_level,
      "grpo: subtract the mean of the group or the batch; none: subtract nothing; auto: group",
      one_of({"auto", "group", "batch", "none"}));
    v("std_level", std_level,
      "grpo: divide by the standard deviation of the group or the batch; none: do not divide; auto: group",
      one_of({"auto", "group", "batch", "none"}));
    v("discount", discount,
      "reinforce_plus_plus: discount of the reward per token before the last; gae: gamma per step",
      range(0.0, 1.0));
    v("gae_lambda", gae_lambda, "gae: lambda; 1 uses the full return, 0 only the next value",
      range(0.0, 1.0));
    v("gae_timestep_unit", gae_timestep_unit, "gae: unit of a time step", one_of({"token", "turn"}));
    v("bootstrap_truncated", bootstrap_truncated,
      "gae: the value after a sample that was cut at the length limit is its last value (AReaL); "
      "false: 0 (verl)");
    v("turn_discount", turn_discount, "turn_returns: discount of the next turn's return", range(0.0, 1.0));
    v("adv_norm", adv_norm, "gae, turn_returns: normalization of advantages over the batch's trained tokens");
    v("gdpo_weights", gdpo_weights,
      "gdpo: weights of a sample's rewards, in alphabetical order of their names; empty: 1 each");
  }
  // Throws UserError if mean_level, std_level or adv_norm is set and the estimator does not use it.
  void check() const;

  // The inputs that the estimator needs, besides rewards and groups.
  bool needs_values() const;     // the critic's values
  bool needs_steps() const;      // per-token lists, AdvantageInput::steps
  bool needs_baselines() const;  // the reward of each group's most likely response, Trajectory::baseline
  // Whether the KL in the reward (kl_ctl) is part of the rewards from which advantages are computed
  // (AdvantageInput::kl_rewards).
  bool takes_kl_rewards() const;
};

// A sequence for per-token and per-turn estimators. All lists have one entry per trained token, in order.
struct SequenceSteps {
  std::vector<double> rewards;  // the reward of each token
  std::vector<double> values;   // the critic's value before the token is sampled; empty if not needed
  std::vector<int32_t> turns;   // adjacent tokens with equal numbers are one turn
  bool truncated = false;       // the response was cut at the length limit
};

// One entry per sequence, [S]. Sequences with equal groups[s] were sampled for one prompt. They need not be
// adjacent.
struct AdvantageInput {
  std::span<const double> rewards;  // shaped
  std::span<const int64_t> groups;
  std::span<const int64_t> tokens = {};         // number of trained tokens; empty: 1 per sequence
  std::vector<std::vector<double>> parts = {};  // the components of each reward; only gdpo needs them
  std::vector<SequenceSteps> steps = {};        // set if needs_steps()
  std::vector<double> baselines = {};           // set if needs_baselines(); shaped rewards
  // One reward per trained token, in addition to `rewards`. Empty: none. Only if takes_kl_rewards().
  std::vector<std::vector<double>> kl_rewards = {};
};

// Returns for each sequence one advantage, or one per trained token if the estimator works per token.
// `returns`, if not nullptr, gets gae's targets for the critic's values, one per trained token.
// Throws UserError if
//   - a reward or a critic's value is not finite (the message names the sequence),
//   - the estimator is unknown, or a level is set that the estimator does not use,
//   - rloo gets a group of one sequence,
//   - gdpo gets rewards without components, or a different number of weights than components.
std::vector<std::vector<double>> compute_advantages(const AdvantageSettings& settings,
                                                    const AdvantageInput& batch,
                                                    std::vector<std::vector<double>>* returns = nullptr);

}  // namespace bough
