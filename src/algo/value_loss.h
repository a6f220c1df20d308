// The loss of a critic's values (PPO's reference implementation; verl and AReaL have the same), by row, with
// V the value now, V_old that of the start of the update, G the return:
//   L = max((V - G)^2, (clip(V, V_old - eps, V_old + eps) - G)^2) / 2
// aggregated with the policy's weights: sum over rows of weight * L. Where the second term is the larger, V
// lies outside of the clip's range, which it left away from G, and has no gradient; else dL/dV = V - G.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "algo/loss.h"

namespace bough {

// All [R], of one type and device.
struct ValueRows {
  at::Tensor values_R, old_values_R, returns_R, weights_R;
};

struct ValueLoss {
  LossOutput output;      // without its coefficient; of metrics critic/loss, critic/clip_fraction
  at::Tensor d_values_R;  // its gradient
};

// eps_clip: none, no clip. Takes any subset of a batch's rows: the results add.
ValueLoss value_loss(const ValueRows& rows, std::optional<double> eps_clip);

// 1 - Var(G - V) / Var(G): 1 for values that are the returns, 0 for a constant and where all returns are
// equal. [R] each.
double explained_variance(const at::Tensor& values_R, const at::Tensor& returns_R);

}  // namespace bough
