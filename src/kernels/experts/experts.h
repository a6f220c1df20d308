// The feed-forward sublayer of a mixture of experts: a router chooses K of E experts for each token, and the
// sublayer adds their outputs, weighted.
//
//   h      = rms_norm(x)                                   (h = x without a norm)
//   l[t,e] = sum_d h[t,d] · router[e,d]                    router_logits()
//   i[t,:] = the K largest of l[t,:], or recorded indices  choose_experts(), or the caller
//   w[t,k] = softmax(l[t,:])[i[t,k]]                       expert_weights()
//            renormalised: divided by sum_k, which equals a softmax over l[t,i[t,:]] alone
//   y[t]   = x[t] + sum_k w[t,k] · down_e · act(gate_e · h[t], up_e · h[t]), e = i[t,k]   experts_mlp()
//
// Gradients flow through w to the router, never through the choice i. So recorded indices ("routing replay")
// change only i. Sizes: T tokens, D hidden, F elements of an expert's feed-forward layer, E experts, K
// experts a token, P = T · K pairs of a token and an expert.
//
// experts_mlp() sorts the pairs by expert and computes each expert's rows with one product a matrix. Weights
// of experts that no token uses are not read. Implementations:
//   groups_on_device()  The pairs are sorted on the GPU, and one at::_grouped_mm a matrix computes all
//                       experts. Forward does not wait for the device. Backward adds each expert's gradient
//                       of the weights by a product with fp32 sums (at::_grouped_mm would round them to
//                       bf16). It waits for the numbers of rows, which forward began to copy.
//   all others          One product a matrix and expert. On a GPU, forward waits for the device once.
#pragma once

#include <optional>

#include "kernels/common/element_types.h"
#include "kernels/parameter.h"

namespace bough {

// x: [T, D] contiguous; norm: [D] or nullptr; router: [E, D], x's dtype. Returns [T, E] in the accumulator
// type. in_model_dtype: the product is rounded to x's dtype, as transformers' is; otherwise it has the
// accumulator type's precision. Differentiable: adds to the main_grad of norm and router.
// batch_invariant: as in linear().
at::Tensor router_logits(const at::Tensor& x_TD, const Parameter* norm, const NormSettings& settings,
                         const Parameter& router, bool in_model_dtype = false, bool batch_invariant = false);

// Returns the indices of the K largest logits of each row, int64 [T, K], largest first. NaN counts as
// largest.
at::Tensor choose_experts(const at::Tensor& logits_TE, int64_t num_chosen);

// logits: [T, E] accumulator type; experts: int64 [T, K], distinct in a row. Returns [T, K], logits' dtype.
// Differentiable in the logits.
at::Tensor expert_weights(const at::Tensor& logits_TE, const at::Tensor& experts_TK, bool renormalise);

struct ExpertsParameters {
  const Parameter* norm;  // [D]; nullptr: the experts read x itself
  // Both hold the experts one after another. gate_up: [E · 2F, D], in each expert gate's rows first. down:
  // [E · D, F]. No biases and no adapters. May be quantized.
  const Parameter &gate_up, &down;
  NormSettings norm_settings;
  GateActivation activation = GateActivation::kSilu;
  bool residual = true;  // false: y without x
  // false if the caller needs only the graph for backward, not y: the last products are skipped, and y is 0.
  bool output_is_read = true;
};

// x: [T, D] contiguous; experts: int64 [T, K] from 0 to E - 1, distinct in a row, on x's device; weights:
// [T, K], accumulator type. Other indices throw InternalError. On a GPU, only those out of range do, with
// groups_on_device() in backward: such a row of y is NaN. Returns [T, D], x's dtype. Differentiable in x and
// weights; adds to main_grad. batch_invariant: the bits of a row of y do not depend on the other rows.
//
// Kept for backward: x, rstd, weights, and the products gate and up of each pair, 2F · K elements per token.
// Backward overwrites the products, so it can run only once. With a = act(gate, up) of a pair:
//   d_w      = (down^T · d_y) · a
//   d_a      = w · (down^T · d_y),   down.main_grad += d_y · (w · a)^T
//   d_h      = sum_k gate_up^T · d_gate_up,   gate_up.main_grad += d_gate_up · h^T
at::Tensor experts_mlp(const at::Tensor& x_TD, const at::Tensor& experts_TK, const at::Tensor& weights_TK,
                       const ExpertsParameters& parameters, bool batch_invariant = false);

// Whether experts_mlp() computes all experts together: bf16 on a GPU of compute capability 9 or 10, unless
// the kernel grouped_product is left out (kernels/common/cuda_library.h). type: of the experts' matrices,
// kChar if quantized. width: D, inner: F; both must be multiples of 8. Then forward can be recorded as a CUDA
// graph.
bool groups_on_device(at::Device device, at::ScalarType type, int64_t num_experts, int64_t width,
                      int64_t inner);

// References in differentiable tensor ops, for any device: they return what the functions above return. They
// add nothing to main_grad; gradients go to the given tensors.
at::Tensor experts_mlp_reference(const at::Tensor& h_TD, const at::Tensor& experts_TK,
                                 const at::Tensor& weights_TK, const at::Tensor& gate_up,
                                 const at::Tensor& down, GateActivation activation = GateActivation::kSilu);

}  // namespace bough
