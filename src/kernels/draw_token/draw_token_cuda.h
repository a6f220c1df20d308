// CUDA launcher of draw_token.h. Pointers are of the device; launch errors are left to cudaGetLastError.
#pragma once

#include <cstdint>

#include "kernels/common/cuda_stream.h"
#include "kernels/common/element_types.h"

namespace bough {

template <class T>
struct DrawTokenCuda {
  double* drawn;           // [num_draws, 5]
  const T* logits;         // [rows, width]
  const double* requests;  // [num_draws, 4]
  int64_t num_draws, width;
};

template <class T>
void draw_token_cuda(const DrawTokenCuda<T>& in, CudaStream stream);

}  // namespace bough
