// Gated activations (Shazeer 2020): y[t,f] = act(gate[t,f]) · up[t,f], act(x) = x · sigmoid(p(x)).
//   kSilu (SwiGLU):     p(x) = x
//   kGeluTanh (GeGLU):  p(x) = 2 · sqrt(2/pi) · (x + 0.044715 · x³), which is GeLU by its tanh
//
// Backward, s = sigmoid(p(gate)), all overwritten:
//   d_gate = d_y · up · s · (1 + gate · p'(gate) · (1 - s))
//   d_up   = d_y · gate · s
// and y again, so that nobody keeps it. Where its memory is d_y's, and d_gate_up's is gate_up's, nothing is
// allocated.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/common/element_types.h"

namespace bough {

// gate_up_TF2: [T, 2F] contiguous, gate in the first F columns, up in the last. Returns [T, F]. Not
// differentiable by itself: kernels/linear is.
at::Tensor swiglu_forward(const at::Tensor& gate_up_TF2, GateActivation activation = GateActivation::kSilu);

// Overwrites y_TF and d_gate_up_TF2, which are like d_y_TF and gate_up_TF2, each memory of its own or exactly
// theirs.
void swiglu_backward(const at::Tensor& d_y_TF, const at::Tensor& gate_up_TF2, const at::Tensor& y_TF,
                     const at::Tensor& d_gate_up_TF2, GateActivation activation = GateActivation::kSilu);

// References of forward and backward, in tensor ops, any device.
at::Tensor swiglu_forward_reference(const at::Tensor& gate_up_TF2,
                                    GateActivation activation = GateActivation::kSilu);
void swiglu_backward_reference(const at::Tensor& d_y_TF, const at::Tensor& gate_up_TF2,
                               const at::Tensor& y_TF, const at::Tensor& d_gate_up_TF2,
                               GateActivation activation = GateActivation::kSilu);

}  // namespace bough
