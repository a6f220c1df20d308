// CUDA launchers of swiglu.h. Pointers are of the device; launch errors are left to cudaGetLastError.
// T: float, BFloat16Bits, double; gate_up, d_gate_up: [num_rows, 2 · width], y, d_y: [num_rows, width].
// Backward: y may be d_y, d_gate_up may be gate_up.
#pragma once

#include <cstdint>

#include "kernels/common/cuda_stream.h"

namespace bough {

template <class T>
void swiglu_forward_cuda(T* y, const T* gate_up, int64_t num_rows, int64_t width, CudaStream stream);

template <class T>
void swiglu_backward_cuda(T* d_gate_up, T* y, const T* d_y, const T* gate_up, int64_t num_rows, int64_t width,
                          CudaStream stream);

}  // namespace bough
