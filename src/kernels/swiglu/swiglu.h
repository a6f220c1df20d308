// SwiGLU (Shazeer 2020): y[t,f] = silu(gate[t,f]) · up[t,f], silu(x) = x · sigmoid(x).
//
// Backward, s = sigmoid(gate), all overwritten:
//   d_gate = d_y · up · s · (1 + gate · (1 - s))
//   d_up   = d_y · gate · s
#pragma once

#include <ATen/core/Tensor.h>

namespace bough {

// gate_up_TF2: [T, 2F] contiguous, gate in the first F columns, up in the last. Returns [T, F]. Differentiable.
at::Tensor swiglu(const at::Tensor& gate_up_TF2);

// Reference, in tensor ops, any device.
at::Tensor swiglu_forward_reference(const at::Tensor& gate_up_TF2);
at::Tensor swiglu_backward_reference(const at::Tensor& d_y_TF, const at::Tensor& gate_up_TF2);

}  // namespace bough
