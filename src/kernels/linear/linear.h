// A linear layer, a linear layer of a normalized input, and the feed-forward sublayer. Each is one autograd
// function that keeps few tensors. Its backward loops over some tensors anyway, and in the same loops
// recomputes values that it did not keep.
#pragma once

#include <optional>

#include "kernels/common/element_types.h"
#include "kernels/parameter.h"

namespace bough {

// y[r,o] = sum_i x[r,i] · weight[o,i] (+ bias[o]) (+ residual[r,o]).
//
// Backward: d_x = d_y · weight and d_residual = d_y are overwritten. weight.main_grad += d_yᵀ · x and
// bias.main_grad += sum_r d_y are accumulated in the accumulator type: bf16 gradients would be rounded in
// each pass over the tree.
//
// A quantized weight (Parameter::scale) has no backward. It may be used only if no graph is recorded.
//
// A weight with an adapter (kernels/parameter.h) adds, to the columns of each of its slices,
//   u = scale · x · Aᵀ,  y += u · Bᵀ
// and in backward, with d_u = scale · d_y · B,
//   d_x += d_u · A;  B.main_grad += d_yᵀ · u;  A.main_grad += d_uᵀ · x.
// Backward recomputes u. A weight or bias without main_grad is frozen, and its gradient is not computed. A
// Parameter with an adapter must outlive the graph.

// x: [R, K]; weight.value: [O, K]; bias: nullptr or [O]; residual: nullopt or [R, O]. Returns [R, O], x's
// dtype. Differentiable. batch_invariant: the bits of a row of y do not depend on the other rows of x
// (batch_invariant_product).
at::Tensor linear(const at::Tensor& x_RK, const Parameter& weight, const Parameter* bias = nullptr,
                  bool batch_invariant = false, const std::optional<at::Tensor>& residual_RO = std::nullopt);

// Throws InternalError unless x is [R, K] and the weight is [O, K] of the same dtype, or quantized while no
// graph is recorded. `op`: name for the message.
void check_linear(const char* op, const at::Tensor& x_RK, const Parameter& weight);

// Parts of linear() for autograd functions of several steps and for callers without autograd.
// linear_forward() computes y and records no graph. linear_backward() adds the gradients of the weight and of
// its adapters, and returns d_x.
//
// y may have the accumulator type of a bf16 x (y_dtype): the sums are then not rounded. d_y has the type of
// y. An fp32 d_y with a bf16 x is split into the sum of two bf16 tensors, so that all products have bf16
// factors: its error is at most 2^-17 of each element, that of one bf16 tensor 2^-9. d_x is then fp32, too.
// If y_dtype is given, the weight must not be quantized, and residual_RO must be nullopt.
//
// add_linear_gradients() does weight_grad += d_yᵀ · x and bias_grad += sum_r
// d_y, each if defined.
at::Tensor linear_forward(const at::Tensor& x_RK, const Parameter& weight, const Parameter* bias,
                          bool batch_invariant, const std::optional<at::Tensor>& residual_RO = std::nullopt,
                          std::optional<at::ScalarType> y_dtype = std::nullopt);
at::Tensor linear_backward(const at::Tensor& d_y_RO, const at::Tensor& x_RK, const Parameter& weight);
void add_linear_gradients(const at::Tensor& weight_grad_OK, const at::Tensor& bias_grad_O,
                          const at::Tensor& d_y_RO, const at::Tensor& x_RK);

// A linear layer of a normalized input, for instance the first step of attention: y = linear(rms_norm(x)).
// Backward recomputes the norm's output from x and rstd, which the norm's backward reads anyway.
//
// Backward, with h = rms_norm(x): d_h = d_y · weight. d_x = the norm's backward of d_h (rms_norm.h) +
// d_residual, overwritten. norm.main_grad, weight.main_grad (+= d_yᵀ · h) and bias.main_grad are
// accumulated.

struct NormLinearOutput {
  at::Tensor y_RO;
  // The input x. A residual connection should read x from this member. Then the backward of norm_linear adds
  // the gradient of the connection to d_x.
  at::Tensor residual_RD;
};

// x: [R, D] contiguous; norm.value: [D]; weight.value: [O, D]; bias: nullptr or [O]. Differentiable.
// batch_invariant: as in linear().
NormLinearOutput norm_linear(const at::Tensor& x_RD, const Parameter& norm, const NormSettings& settings,
                             const Parameter& weight, const Parameter* bias = nullptr,
                             bool batch_invariant = false);

// The feed-forward sublayer: y = x + act(rms_norm(x) · gate_upᵀ) · downᵀ. act is a gated activation
// (kernels/swiglu). Biases are optional. The norm and the residual can be left out, for models with
// post-norm.
//
// Kept for backward are x, rstd and the products gate and up: D + 2F elements per token. Autograd over the
// single ops would keep 2D + 3F. Backward recomputes the norm's output h and the activation a = act(gate,
// up):
//   d_a = d_y · down              then one loop: a overwrites d_a, and d_gate_up overwrites gate and up
//   down.main_grad += d_yᵀ · a
//   d_h = d_gate_up · gate_up     then one loop: d_x = d_y + norm's backward of d_h, and h overwrites d_h
//   gate_up.main_grad += d_gate_upᵀ · h,  norm.main_grad as in rms_norm.h
// Backward overwrites the tensors it kept, so it can run only once. Autograd throws at a second backward.

struct MlpParameters {
  const Parameter* norm;            // [D]; nullptr: gate_up reads x itself
  const Parameter &gate_up, &down;  // [2F, D] with gate's rows first, [D, F]
  NormSettings norm_settings;
  GateActivation activation = GateActivation::kSilu;
  const Parameter *gate_up_bias = nullptr, *down_bias = nullptr;  // [2F], [D]
  bool residual = true;
  // false if the caller needs only the graph for backward, not y: the last product is skipped, and y is 0.
  bool output_is_read = true;
};

// x: [T, D] contiguous. Returns [T, D], x's dtype. Differentiable. batch_invariant: as in linear().
at::Tensor mlp(const at::Tensor& x_TD, const MlpParameters& parameters, bool batch_invariant = false);

}  // namespace bough
