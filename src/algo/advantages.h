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

struct AdvantageSettings {
  std::string adv_estimator = "grpo";
  bool std_unbiased = true;
  double eps = 1e-6;
  std::string mean_level = "auto";
  std::string std_level = "auto";
  double discount = 1.0;
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
    v("discount", discount, "reinforce_plus_plus: of the reward, from the last token back", range(0.0, 1.0));
    v("gdpo_weights", gdpo_weights,
      "gdpo: weights of a sample's rewards, in alphabetical order of their names; empty: 1 each");
  }
  // UserError: levels for an estimator that has none.
  void check() const;
};

// All by sequence, [S]. Sequences with equal groups[s] were sampled for one prompt and may stand anywhere.
struct AdvantageInput {
  std::span<const double> rewards;  // shaped
  std::span<const int64_t> groups;
  std::span<const int64_t> tokens = {};         // trained ones; empty where nobody knows: one each
  std::vector<std::vector<double>> parts = {};  // of each reward its parts; only gdpo needs them
};

// Advantages of each sequence: one number, or where the estimator has them by token, one a trained token.
// UserError: a reward that is not finite (names the sequence); an unknown estimator, or settings that it does
// not have; rloo with a group of one; gdpo where rewards have no parts, or weights are not as many.
std::vector<std::vector<double>> compute_advantages(const AdvantageSettings& settings,
                                                    const AdvantageInput& batch);

}  // namespace bough
