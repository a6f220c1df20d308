// y[r,o] = sum_i x[r,i] · weight[o,i] (+ bias[o]).
//
// Backward: d_x = d_y · weight (overwritten); weight.main_grad += d_yᵀ · x, bias.main_grad += sum_r d_y
// (accumulated with beta = 1 in the accumulator type: summing bf16 gradients over a tree's passes would round
// at each of them).
#pragma once

#include "kernels/parameter.h"

namespace bough {

// x: [R, I]; weight.value: [O, I]; bias null or [O]. Returns [R, O], x's dtype. Differentiable. batch_invariant: a row
// of y has the same bits whatever other rows x has (batch_invariant_product).
at::Tensor linear(const at::Tensor& x_RI, const Parameter& weight, const Parameter* bias = nullptr,
                  bool batch_invariant = false);

}  // namespace bough
