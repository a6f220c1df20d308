// A linear layer of a normalised input, as attention begins: y = linear(rms_norm(x)). The norm's output is not kept for
// backward but computed again from x and rstd, while the norm's own backward reads them.
//
// Backward, with h = rms_norm(x): d_h = d_y · weight; d_x by rms_norm.h from d_h, plus d_residual (overwritten);
// norm.main_grad, weight.main_grad += d_yᵀ · h and bias.main_grad as rms_norm.h and linear.h add to them.
#pragma once

#include "kernels/parameter.h"

namespace bough {

struct NormLinearOutput {
  at::Tensor y_RO;
  // x again: what a residual connection should read, so that its gradient is added in this function's backward.
  at::Tensor residual_RD;
};

// x: [R, D] contiguous; norm.value: [D]; weight.value: [O, D]; bias null or [O]. Differentiable. batch_invariant as of
// linear().
NormLinearOutput norm_linear(const at::Tensor& x_RD, const Parameter& norm, double eps,
                             const Parameter& weight, const Parameter* bias = nullptr,
                             bool batch_invariant = false);

}  // namespace bough
