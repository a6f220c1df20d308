// Launchers of the CUDA kernels of rms_norm.h (cuda_launch.h).
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

template <class T, class A>
void rms_norm_forward_cuda(T* y, A* rstd, const T* x, const T* weight, int64_t num_rows, int64_t width,
                           const NormSettings& norm, CudaStream stream);

template <class T, class A>
struct RmsNormBackward {
  T* d_x;       // overwritten
  T* y;         // the forward's y, overwritten; may be d_y or nullptr
  A* d_weight;  // [width], accumulated
  A* partial;   // scratch [rms_norm_num_parts(num_rows), width]
  const T* d_y;
  const T* x;
  const T* weight;
  const T* residual;  // added to d_x; or nullptr
  const A* rstd;
  int64_t num_rows;
  int64_t width;
  A weight_offset;
};

// Number of parts into which backward divides the sum of d_weight over rows. It depends only on the number of
// rows, so that the order of the sum is the same on every device.
int64_t rms_norm_num_parts(int64_t num_rows);

template <class T, class A>
void rms_norm_backward_cuda(const RmsNormBackward<T, A>& arguments, CudaStream stream);

}  // namespace bough
