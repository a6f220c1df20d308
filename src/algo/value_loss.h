// The critic's loss, as in PPO's reference implementation, verl and AReaL. Per loss row, with V the current
// value, V_old the value at the start of the update and G the return:
//   L = max((V - G)^2, (clip(V, V_old - eps, V_old + eps) - G)^2) / 2
// The loss is the sum over rows of weight * L, with the weights of the policy loss. If the second term is the
// larger, V is outside the clip range and the clipped value is further from G. Then dL/dV = 0, otherwise
// dL/dV = V - G.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "algo/loss.h"

namespace bough {

// All [R], of one dtype and device.
struct ValueRows {
  at::Tensor values_R, old_values_R, returns_R, weights_R;
};

struct ValueLoss {
  LossOutput output;      // without the loss's coefficient; metrics: critic/loss, critic/clip_fraction
  at::Tensor d_values_R;  // the gradient of output.loss
};

// eps_clip: nullopt for no clip. The rows may be any subset of the batch; losses and metrics of subsets add.
// Throws InternalError if shapes or dtypes differ.
ValueLoss value_loss(const ValueRows& rows, std::optional<double> eps_clip);

// Returns 1 - Var(G - V) / Var(G): 1 if the values equal the returns, 0 if the values are constant or all
// returns are equal. Both tensors are [R].
double explained_variance(const at::Tensor& values_R, const at::Tensor& returns_R);

}  // namespace bough
