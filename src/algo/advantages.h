// Rewards to advantages. Pure functions of the batch; everything in fp64. The equations are in advantages/, a
// file each.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/settings.h"

namespace bough {

// Every estimator there is: the choices of adv_estimator.
std::vector<std::string> estimator_names();

// AReaL's adv_norm. auto: batch for gae, none for turn_returns.
struct AdvantageNormSettings {
  std::string mean_level = "auto";
  std::string std_level = "auto";

  template <class V>
  void visit(V& v) {
    v("mean_level", mean_level, "what is subtracted", one_of({"auto", "batch", "none"}));
    v("std_level", std_level, "what it is divided by", one_of({"auto", "batch", "none"}));
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
    v("adv_estimator", adv_estimator, "how rewards become advantages", one_of({names.begin(), names.end()}));
    v("std_unbiased", std_unbiased, "grpo, gdpo: divide by n - 1, not n, inside the standard deviation");
    v("eps", eps, "grpo, gdpo: added to the standard deviation; maxrl: to the mean", range(0.0, 1.0));
    v("mean_level", mean_level, "grpo: what is subtracted is the mean of the group, of the batch, or nothing",
      one_of({"auto", "group", "batch", "none"}));
    v("std_level", std_level, "grpo: what it is divided by is the deviation of the group, of the batch, or 1",
      one_of({"auto", "group", "batch", "none"}));
    v("discount", discount,
      "reinforce_plus_plus: of the reward, from the last token back; gae: gamma, a step", range(0.0, 1.0));
    v("gae_lambda", gae_lambda, "gae: 1 takes the whole return, 0 the next value alone", range(0.0, 1.0));
    v("gae_timestep_unit", gae_timestep_unit, "gae: what a step is", one_of({"token", "turn"}));
    v("bootstrap_truncated", bootstrap_truncated,
      "gae: after a sample cut at the length limit comes its last value, as AReaL has it; false: 0, as verl "
      "has it");
    v("turn_discount", turn_discount, "turn_returns: of the next turn's return", range(0.0, 1.0));
    v("adv_norm", adv_norm, "gae, turn_returns: advantages are normalised over the batch's trained tokens");
    v("gdpo_weights", gdpo_weights,
      "gdpo: weights of a sample's rewards, in alphabetical order of their names; empty: 1 each");
  }
  // UserError: levels for an estimator that has none.
  void check() const;

  // What the estimator asks of a batch: a critic's values; lists by token (AdvantageInput::steps); the reward
  // of each group's most likely response (Trajectory::baseline).
  bool needs_values() const;
  bool needs_steps() const;
  bool needs_baselines() const;
};

// A sequence as estimators by token and by turn see it: lists by trained token, in order.
struct SequenceSteps {
  std::vector<double> rewards;  // that each token earns
  std::vector<double> values;   // of a critic, before the token is drawn; empty where none is asked for
  std::vector<int32_t> turns;   // equal numbers in a row are a turn
  bool truncated = false;       // cut at the length limit
};

// All by sequence, [S]. Sequences with equal groups[s] were sampled for one prompt and may stand anywhere.
struct AdvantageInput {
  std::span<const double> rewards;  // shaped
  std::span<const int64_t> groups;
  std::span<const int64_t> tokens = {};         // trained ones; empty where nobody knows: one each
  std::vector<std::vector<double>> parts = {};  // of each reward its parts; only gdpo needs them
  std::vector<SequenceSteps> steps = {};        // where the estimator needs them
  std::vector<double> baselines = {};           // the same: shaped rewards of the groups' likeliest responses
};

// Advantages of each sequence: one number, or where the estimator has them by token, one a trained token.
// UserError: a reward that is not finite (names the sequence); an unknown estimator, or settings that it does
// not have; rloo with a group of one; gdpo where rewards have no parts, or weights are not as many; gae where
// a value is not finite. `returns`, where given: what gae says the critic's values should have been, one a
// trained token.
std::vector<std::vector<double>> compute_advantages(const AdvantageSettings& settings,
                                                    const AdvantageInput& batch,
                                                    std::vector<std::vector<double>>* returns = nullptr);

}  // namespace bough
