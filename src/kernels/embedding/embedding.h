// y[t] = weight[tokens[t]] · scale. Backward: weight.main_grad[tokens[t]] += d_y[t] · scale, in the
// accumulator type. If several positions t have the same token, their terms are added in the order of t.
#pragma once

#include "kernels/parameter.h"

namespace bough {

// tokens_T: int64, each in [0, V), which the caller must check; weight.value: [V, D]. `scale` is rounded to
// the weight's dtype. Returns [T, D]. Differentiable: the autograd graph of a pass begins here.
at::Tensor embedding(const at::Tensor& tokens_T, const Parameter& weight, double scale = 1);

// sums[tokens[t]] += rows[t]. sums_VD: contiguous, accumulator type of rows; rows_TD: fp32, bf16 or fp64,
// contiguous.
void add_embedding_gradient_(const at::Tensor& sums_VD, const at::Tensor& tokens_T,
                             const at::Tensor& rows_TD);

// Reference of add_embedding_gradient_ for any device.
void add_embedding_gradient_reference_(const at::Tensor& sums_VD, const at::Tensor& tokens_T,
                                       const at::Tensor& rows_TD);

}  // namespace bough
