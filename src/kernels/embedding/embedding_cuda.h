// Launcher of the CUDA kernel of embedding.h (cuda_launch.h).
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

template <class T, class A>
struct EmbeddingGradient {
  A* sums;                // [V, width], accumulated
  const int64_t* tokens;  // [num_rows], ascending
  const int64_t* order;   // [num_rows]: tokens[i] is the token of row order[i]; ascending for equal tokens
  const T* rows;          // [num_rows, width]
  int64_t num_rows, width;
};

template <class T, class A>
void add_embedding_gradient_cuda(const EmbeddingGradient<T, A>& gradient, CudaStream stream);

}  // namespace bough
