// Coefficients that change from training step to training step. Their values are part of a run's checkpoint.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "algo/loss_settings.h"

namespace bough {

// Controls the coefficient c of the KL in the reward (Ziegler et al. 2019, section 2.2; verl's kl_ctrl).
// After a training step over n sequences with mean KL kl:
//   c <- c (1 + clip(kl / target_kl - 1, -0.2, 0.2) n / horizon)
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

// Controls the coefficient c of the entropy bonus (Skywork-OR1, He et al. 2025). e is the mean entropy of the
// tokens of the previous training step. The first training step has c = entropy_coef.
//   e <= target_entropy: c <- c + entropy_coef_delta, and the bonus is on
//   otherwise:           c <- max(0, c - entropy_coef_delta), and the bonus is off
// The paper uses the entropy of the current batch. That would need an extra forward pass before the update.
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
  // Coefficient of the next training step. nullopt (the loss uses entropy_coef) if target_entropy is unset.
  std::optional<double> coefficient() const {
    if (!target_) return {};
    return is_on ? value : 0.0;
  }

 private:
  std::optional<double> target_;
  double delta_;
};

// For each loss row, returns the sum of kl_R over this row and all later rows of its sequence. The caller
// subtracts kl_ctl times this sum from the advantages, which were normalized without the KL (AReaL's kl_ctl
// with discount and lambda 1). Rows of one sequence are adjacent.
at::Tensor kl_to_go(const at::Tensor& kl_R, const at::Tensor& sequences_R);
// Returns the mean over sequences of each sequence's mean over its loss rows; 0 if there are no rows.
double mean_of_sequence_means(const at::Tensor& x_R, const at::Tensor& sequences_R);

}  // namespace bough
