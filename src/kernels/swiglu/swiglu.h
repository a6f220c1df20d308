// Gated activations (Shazeer 2020): y[t,f] = act(gate[t,f]) · up[t,f], act(x) = x · sigmoid(p(x)).
//   kSilu (SwiGLU):     p(x) = x
//   kGeluTanh (GeGLU):  p(x) = 2 · sqrt(2/pi) · (x + 0.044715 · x³), the tanh approximation of GeLU
//
// Backward overwrites its results. With s = sigmoid(p(gate)):
//   d_gate = d_y · up · s · (1 + gate · p'(gate) · (1 - s))
//   d_up   = d_y · gate · s
// Backward also recomputes y, so that callers need not keep it. It can write y to the memory of d_y and
// d_gate_up to the memory of gate_up, so that callers need no new memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/common/element_types.h"

namespace bough {

// gate_up_TF2: [T, 2F] contiguous, gate in the first F columns, up in the last F. Returns [T, F]. Not
// differentiable; mlp() in kernels/linear is.
at::Tensor swiglu_forward(const at::Tensor& gate_up_TF2, GateActivation activation = GateActivation::kSilu);

// Overwrites y_TF and d_gate_up_TF2. y_TF has the shape and dtype of d_y_TF, d_gate_up_TF2 those of
// gate_up_TF2. y_TF may be d_y_TF, and d_gate_up_TF2 may be gate_up_TF2. No other memory may overlap.
void swiglu_backward(const at::Tensor& d_y_TF, const at::Tensor& gate_up_TF2, const at::Tensor& y_TF,
                     const at::Tensor& d_gate_up_TF2, GateActivation activation = GateActivation::kSilu);

// References of forward and backward in tensor ops, for any device.
at::Tensor swiglu_forward_reference(const at::Tensor& gate_up_TF2,
                                    GateActivation activation = GateActivation::kSilu);
void swiglu_backward_reference(const at::Tensor& d_y_TF, const at::Tensor& gate_up_TF2,
                               const at::Tensor& y_TF, const at::Tensor& d_gate_up_TF2,
                               GateActivation activation = GateActivation::kSilu);

}  // namespace bough
