// Linear layers: alone, of a normalised input, and the feed-forward sublayer. Each is one autograd function
// that keeps for backward what it cannot compute again in a pass over memory that it makes anyway.
#pragma once

#include <optional>

#include "kernels/common/element_types.h"
#include "kernels/parameter.h"

namespace bough {

// y[r,o] = sum_i x[r,i] · weight[o,i] (+ bias[o]) (+ residual[r,o]).
//
// Backward: d_x = d_y · weight (overwritten), d_residual = d_y; weight.main_grad += d_yᵀ · x, bias.main_grad
// += sum_r d_y (accumulated with beta = 1 in the accumulator type: summing bf16 gradients over a tree's
// passes would round at each of them).
//
// A quantized weight (Parameter::scale) has no backward: such a layer runs where no graph is recorded.
//
// A weight with an adapter (kernels/parameter.h) adds, to the columns of each of its slices,
//   u = scale · x · Aᵀ,  y += u · Bᵀ
// and in backward, with d_u = scale · d_y · B,
//   d_x += d_u · A;  B.main_grad += d_yᵀ · u;  A.main_grad += d_uᵀ · x.
// u is not kept but computed again. A weight or bias without main_grad is frozen: no product is taken for its
// gradient. The Parameter must outlive the graph where it has an adapter.

// x: [R, K]; weight.value: [O, K]; bias null or [O]; residual none or [R, O]. Returns [R, O], x's dtype.
// Differentiable. batch_invariant: a row of y has the same bits whatever other rows x has
// (batch_invariant_product).
at::Tensor linear(const at::Tensor& x_RK, const Parameter& weight, const Parameter* bias = nullptr,
                  bool batch_invariant = false, const std::optional<at::Tensor>& residual_RO = std::nullopt);

// x [R, K] goes with the weight [O, K]: of its dtype, or the weight is quantized and no graph is recorded.
void check_linear(const char* op, const at::Tensor& x_RK, const Parameter& weight);

// Parts of linear() for functions of several steps that keep less than autograd would: y alone, and
// weight.main_grad += d_yᵀ · x, bias_grad += sum_r d_y, each if defined.
at::Tensor linear_forward(const at::Tensor& x_RK, const Parameter& weight, const Parameter* bias,
                          bool batch_invariant, const std::optional<at::Tensor>& residual_RO = std::nullopt);
void add_linear_gradients(const at::Tensor& weight_grad_OK, const at::Tensor& bias_grad_O,
                          const at::Tensor& d_y_RO, const at::Tensor& x_RK);

// A linear layer of a normalised input, as attention begins: y = linear(rms_norm(x)). The norm's output is
// not kept for backward but computed again from x and rstd, while the norm's own backward reads them.
//
// Backward, with h = rms_norm(x): d_h = d_y · weight; d_x by rms_norm.h from d_h, plus d_residual
// (overwritten); norm.main_grad, weight.main_grad += d_yᵀ · h and bias.main_grad as rms_norm.h and linear.h
// add to them.

struct NormLinearOutput {
  at::Tensor y_RO;
  // The input x, which a residual connection should read here, so that its gradient is added in this
  // function's backward.
  at::Tensor residual_RD;
};

// x: [R, D] contiguous; norm.value: [D]; weight.value: [O, D]; bias null or [O]. Differentiable.
// batch_invariant means what it does in linear().
NormLinearOutput norm_linear(const at::Tensor& x_RD, const Parameter& norm, const NormSettings& settings,
                             const Parameter& weight, const Parameter* bias = nullptr,
                             bool batch_invariant = false);

// The feed-forward sublayer: y = x + act(rms_norm(x) · gate_upᵀ) · downᵀ, act gated (kernels/swiglu), with
// biases where the model has them; without the norm or the residual where a model norms the output instead.
//
// Kept for backward are x, rstd and the products gate and up: D + 2F elements a token, where autograd over
// the single ops keeps 2D + 3F. The norm's output h and the activation a = act(gate, up) are computed
// again in the passes over memory that need what they are computed from:
//   d_a = d_y · down              then one pass: a and d_gate_up, in place of d_a and gate, up
//   down.main_grad += d_yᵀ · a
//   d_h = d_gate_up · gate_up     then one pass: d_x = d_y + norm's backward, h in place of d_h
//   gate_up.main_grad += d_gate_upᵀ · h,  norm.main_grad as rms_norm.h
// Backward overwrites what was kept: it runs once, a second one is refused by autograd.

struct MlpParameters {
  const Parameter* norm;            // [D], or null: gate_up reads x itself
  const Parameter &gate_up, &down;  // [2F, D] with gate's rows first, [D, F]
  NormSettings norm_settings;
  GateActivation activation = GateActivation::kSilu;
  const Parameter *gate_up_bias = nullptr, *down_bias = nullptr;  // [2F], [D]
  bool residual = true;
  bool output_is_read = true;  // else the last product is left out: values are 0, the graph is the same
};

// x: [T, D] contiguous. Returns [T, D], x's dtype. Differentiable. batch_invariant means what it does in
// linear().
at::Tensor mlp(const at::Tensor& x_TD, const MlpParameters& parameters, bool batch_invariant = false);

}  // namespace bough
