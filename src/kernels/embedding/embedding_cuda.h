// CUDA launcher of embedding.h. Pointers are of the device; launch errors are left to cudaGetLastError.
// T, A: float, float; BFloat16Bits, float; double, double.
#pragma once

#include <cstdint>

#include "kernels/common/cuda_stream.h"

namespace bough {

template <class T, class A>
struct EmbeddingGradient {
  A* sums;                // [V, width], added to
  const int64_t* tokens;  // [num_rows], ascending
  const int64_t* order;   // [num_rows]: tokens[i] is that of row order[i]; ascending within a token
  const T* rows;          // [num_rows, width]
  int64_t num_rows, width;
};

template <class T, class A>
void add_embedding_gradient_cuda(const EmbeddingGradient<T, A>& gradient, CudaStream stream);

}  // namespace bough
