// RMSNorm (Zhang and Sennrich 2019):
//   y[r,d] = x[r,d] · rstd[r] · (weight[d] + weight_offset), rstd[r] = 1/sqrt(mean_d x[r,d]² + eps)
//
// All arithmetic is in the accumulator type. Backward, with g = d_y · (weight + weight_offset):
//   d_x[r,d]     = rstd · (g[d] - x[d] · rstd² · mean_d(g · x))     (overwritten)
//   d_weight[d] += sum_r d_y[r,d] · x[r,d] · rstd[r]                 (accumulated, accumulator type)
// Sublayers that keep only x and rstd (kernels/linear) call forward and backward directly. Backward can then
// add a residual's gradient to d_x and recompute y.
#pragma once

#include <optional>
#include <tuple>

#include "kernels/common/element_types.h"
#include "kernels/parameter.h"

namespace bough {

// x: [..., D] contiguous. Returns y with x's shape and dtype. Differentiable; adds to weight.main_grad.
at::Tensor rms_norm(const at::Tensor& x, const Parameter& weight, const NormSettings& norm);

// Returns y, and rstd [rows] in the accumulator type.
std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& x, const at::Tensor& weight_D,
                                                    const NormSettings& norm);

struct RmsNormGradient {
  at::Tensor d_y, x, weight_D, rstd;
  std::optional<at::Tensor> residual;  // like x; added to d_x before rounding
  at::Tensor d_weight_D;               // accumulated; undefined if the weight is frozen
  std::optional<at::Tensor> y;         // like x; overwritten with the forward's y; may share d_y's memory
  double weight_offset = 0;
};
// Returns d_x. All tensors are contiguous.
at::Tensor rms_norm_backward(const RmsNormGradient& in);

// References of forward and backward in tensor ops, for any device.
std::tuple<at::Tensor, at::Tensor> rms_norm_forward_reference(const at::Tensor& x, const at::Tensor& weight_D,
                                                              const NormSettings& norm);
at::Tensor rms_norm_backward_reference(const RmsNormGradient& in);

}  // namespace bough
