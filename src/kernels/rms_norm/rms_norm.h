// RMSNorm (Zhang and Sennrich 2019): y[r,d] = x[r,d] · rstd[r] · weight[d], rstd[r] = 1/sqrt(mean_d x[r,d]² + eps).
//
// Everything between the load and the store is in the accumulator type. Backward, with g = d_y · weight:
//   d_x[r,d]     = rstd · (g[d] - x[d] · rstd² · mean_d(g · x))     (overwritten)
//   d_weight[d] += sum_r d_y[r,d] · x[r,d] · rstd[r]                 (accumulated, accumulator type)
#pragma once

#include <tuple>

#include "kernels/parameter.h"

namespace bough {

// x: [..., D] contiguous. Returns y like x. Differentiable; adds to weight.main_grad.
at::Tensor rms_norm(const at::Tensor& x, const Parameter& weight, double eps);

// Reference, in tensor ops, any device. Returns y and rstd[rows] (accumulator type).
std::tuple<at::Tensor, at::Tensor> rms_norm_forward_reference(const at::Tensor& x, const at::Tensor& weight_D,
                                                              double eps);
at::Tensor rms_norm_backward_reference(const at::Tensor& d_y, const at::Tensor& x, const at::Tensor& weight_D,
                                       const at::Tensor& rstd, const at::Tensor& d_weight_D);

}  // namespace bough
