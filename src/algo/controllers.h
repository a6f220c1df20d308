// Coefficients that move from step to step. Their values belong to a run's checkpoint.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "algo/loss_settings.h"

namespace bough {

// Of the KL in the reward (Ziegler et al. 2019, section 2.2; verl's kl_ctrl): after a step over n sequences
// whose mean KL is kl,  c <- c (1 + clip(kl / target_kl - 1, -0.2, 0.2) n / horizon).
struct KlController {
  double value;

  explicit KlController(const LossSettings& settings)
      : value(settings.kl_ctl),
        is_adaptive_(settings.kl_ctrl.type == "adaptive"),
        control_(settings.kl_ctrl) {}

  void update(double kl, int64_t sequences) {
    if (!is_adaptive_ || sequences == 0) return;
    const double error = std::clamp(kl / control_.target_kl - 1, -0.2, 0.2);
    value *= 1 + error * static_cast<double>(sequences) / control_.horizon;
  }

 private:
  bool is_adaptive_;
  KlControlSettings control_;
};

// Of the entropy bonus (Skywork-OR1, He et al. 2025): with e the mean entropy of a step's tokens, the next
// step has c + entropy_coef_delta where e <= target_entropy and c - entropy_coef_delta, not below 0, where it
// is above, and the bonus counts only in the first case. The published form looks at the step's own entropy,
// which takes a walk of its own before; here it is the step's before. The first step has entropy_coef.
struct EntropyController {
  double value;
  bool is_on = true;

  explicit EntropyController(const LossSettings& settings)
      : value(settings.entropy_coef), target_(settings.target_entropy), delta_(settings.entropy_coef_delta) {}

  void update(double entropy) {
    if (!target_) return;
    is_on = entropy <= *target_;
    value = std::max(0.0, value + (is_on ? delta_ : -delta_));
  }
  // What the loss takes; nothing where it is the settings'.
  std::optional<double> coefficient() const {
    if (!target_) return {};
    return is_on ? value : 0.0;
  }

 private:
  std::optional<double> target_;
  double delta_;
};

// What a KL by token in the reward adds to the advantages of an estimator that has one reward a sequence,
// which is normalised without it (AReaL's kl_ctl with discount and lambda 1): the sum of the row's own and
// all later rows of its sequence, to be subtracted. Rows of one sequence are adjacent.
at::Tensor kl_to_go(const at::Tensor& kl_R, const at::Tensor& sequences_R);
// The mean over sequences of each one's mean over its rows; 0 without a row.
double mean_of_sequence_means(const at::Tensor& x_R, const at::Tensor& sequences_R);

}  // namespace bough
