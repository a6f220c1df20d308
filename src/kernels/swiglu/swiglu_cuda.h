// Launchers of the CUDA kernels of swiglu.h (cuda_launch.h).
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

// gate_up, d_gate_up: [num_rows, 2 · width]; y, d_y: [num_rows, width]. In backward y may be d_y, and
// d_gate_up may be gate_up.
template <class T>
void swiglu_forward_cuda(T* y, const T* gate_up, int64_t num_rows, int64_t width, GateActivation activation,
                         CudaStream stream);

template <class T>
void swiglu_backward_cuda(T* d_gate_up, T* y, const T* d_y, const T* gate_up, int64_t num_rows, int64_t width,
                          GateActivation activation, CudaStream stream);

}  // namespace bough
