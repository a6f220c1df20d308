// Launchers of the CUDA kernels of expert_pairs.h (cuda_launch.h).
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

// experts, places: [num_pairs]; pairs: [num_pairs]; ends: [num_experts].
void sort_pairs_cuda(int64_t* pairs, int64_t* places, int32_t* ends, const int64_t* experts,
                     int64_t num_pairs, int64_t num_experts, CudaStream stream);

template <class T, class A>
struct WeightedRows {
  T* y;                   // [num_tokens, width]
  const T* rows;          // [num_tokens · num_chosen, width]
  const int64_t* places;  // [num_tokens, num_chosen]
  const A* weights;       // the same; nullptr: all 1
  const T* residual;      // [num_tokens, width]; nullptr: 0
  int64_t num_tokens, num_chosen, width;
};
template <class T, class A>
void add_weighted_rows_cuda(const WeightedRows<T, A>& sums, CudaStream stream);

// a, d_a: [num_rows, width]; d_gate_up: [num_rows, 2 · width]; d_weights, weights: [num_rows].
template <class T, class A>
void weigh_rows_cuda(A* d_weights, T* a, T* d_gate_up, const T* d_a, const A* weights, int64_t num_rows,
                     int64_t width, CudaStream stream);

}  // namespace bough
