// Launchers of the CUDA kernels of qk_norm_rotary.h (cuda_launch.h).
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

template <class T, class A>
struct QkNormRotaryInput {
  const T* qkv;              // [num_tokens, (N + 2G) · head_dim]
  const A *cos, *sin;        // [num_tokens, num_pairs]
  const T *q_norm, *k_norm;  // [head_dim], or both nullptr
  int64_t num_tokens;
  int64_t num_heads;     // N
  int64_t num_kv_heads;  // G
  int64_t head_dim;
  int64_t num_pairs;  // pairs of elements that are rotated, at most head_dim / 2
  A eps;
  A weight_offset;
};

template <class T, class A>
void qk_norm_rotary_forward_cuda(const QkNormRotaryInput<T, A>& input, T* q, T* k, T* v, CudaStream stream);

template <class T, class A>
struct QkNormRotaryGradient {
  const T *d_q, *d_k, *d_v;
  T* d_qkv;                // overwritten
  A *d_q_norm, *d_k_norm;  // [head_dim], accumulated; nullptr without norms
  A* partial;              // scratch [qk_norm_rotary_num_parts(...), 2, head_dim]; nullptr without norms
};

// Number of parts into which backward divides the sums of d_q_norm and d_k_norm. It depends only on the
// sizes, so that the order of the sums is the same on every device.
int64_t qk_norm_rotary_num_parts(int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads);

// The largest head_dim whose sums fit the shared memory of a CUDA thread block: 6144 in fp32, 3072 in fp64.
int64_t qk_norm_rotary_max_head_dim(int64_t accumulator_bytes);

template <class T, class A>
void qk_norm_rotary_backward_cuda(const QkNormRotaryInput<T, A>& input,
                                  const QkNormRotaryGradient<T, A>& gradient, CudaStream stream);

}  // namespace bough
