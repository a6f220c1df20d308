// The feed-forward sublayer with its residual: y = x + swiglu(rms_norm(x) · gate_upᵀ) · downᵀ.
//
// Kept for backward are x, rstd and the products gate and up: D + 2F elements a token, where autograd over the single ops
// keeps 2D + 3F. The norm's output h and the activation a = swiglu(gate, up) are computed again in the passes over memory
// that need what they are computed from:
//   d_a = d_y · down                                  then one pass: a and d_gate_up, in place of d_a and gate, up
//   down.main_grad += d_yᵀ · a
//   d_h = d_gate_up · gate_up                         then one pass: d_x = d_y + norm's backward, h in place of d_h
//   gate_up.main_grad += d_gate_upᵀ · h,  norm.main_grad as rms_norm.h
// Backward overwrites what was kept: it runs once, a second one is refused by autograd.
#pragma once

#include "kernels/parameter.h"

namespace bough {

struct MlpParameters {
  const Parameter &norm, &gate_up, &down;  // [D], [2F, D] with gate's rows first, [D, F]
  double eps;                              // of the norm
};

// x: [T, D] contiguous. Returns [T, D], x's dtype. Differentiable. batch_invariant as of linear().
at::Tensor mlp(const at::Tensor& x_TD, const MlpParameters& parameters, bool batch_invariant = false);

}  // namespace bough
