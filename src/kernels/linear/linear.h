// y[r,o] = sum_i x[r,i] · weight[o,i] (+ bias[o]) (+ residual[r,o]).
//
// Backward: d_x = d_y · weight (overwritten), d_residual = d_y; weight.main_grad += d_yᵀ · x, bias.main_grad += sum_r d_y
// (accumulated with beta = 1 in the accumulator type: summing bf16 gradients over a tree's passes would round
// at each of them).
//
// A quantized weight (Parameter::scale) has no backward: such a layer runs where no graph is recorded.
#pragma once

#include <optional>

#include "kernels/parameter.h"

namespace bough {

// x: [R, I]; weight.value: [O, I]; bias null or [O]; residual none or [R, O]. Returns [R, O], x's dtype.
// Differentiable. batch_invariant: a row of y has the same bits whatever other rows x has (batch_invariant_product).
at::Tensor linear(const at::Tensor& x_RI, const Parameter& weight, const Parameter* bias = nullptr,
                  bool batch_invariant = false, const std::optional<at::Tensor>& residual_RO = std::nullopt);

// x [R, I] goes with the weight [O, I]: of its dtype, or the weight is quantized and no graph is recorded.
void check_linear(const char* op, const at::Tensor& x_RI, const Parameter& weight);

// For functions of several steps that keep less than autograd would: y alone, and weight.main_grad += d_yᵀ · x,
// bias_grad (if defined) += sum_r d_y.
at::Tensor linear_forward(const at::Tensor& x_RI, const Parameter& weight, const Parameter* bias,
                          bool batch_invariant, const std::optional<at::Tensor>& residual_RO = std::nullopt);
void add_linear_gradients(const at::Tensor& weight_grad_OI, const at::Tensor& bias_grad_O,
                          const at::Tensor& d_y_RO, const at::Tensor& x_RI);

}  // namespace bough
