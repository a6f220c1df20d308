// CUDA launchers of rms_norm.h. Pointers are of the device; launch errors are left to cudaGetLastError.
// T, A: float, float; BFloat16Bits, float; double, double.
#pragma once

#include <cstdint>

#include "kernels/common/cuda_stream.h"

namespace bough {

template <class T, class A>
void rms_norm_forward_cuda(T* y, A* rstd, const T* x, const T* weight, int64_t num_rows, int64_t width,
                           double eps, CudaStream stream);

template <class T, class A>
struct RmsNormBackward {
  T* d_x;       // overwritten
  T* y;         // the forward's, overwritten; may be d_y; or null
  A* d_weight;  // [width], added to
  A* partial;   // scratch [rms_norm_num_parts(num_rows), width]
  const T* d_y;
  const T* x;
  const T* weight;
  const T* residual;  // added to d_x, or null
  const A* rstd;
  int64_t num_rows;
  int64_t width;
};

// A function of the rows alone, so that the order of the sum is the same on every device.
int64_t rms_norm_num_parts(int64_t num_rows);

template <class T, class A>
void rms_norm_backward_cuda(const RmsNormBackward<T, A>& arguments, CudaStream stream);

}  // namespace bough
