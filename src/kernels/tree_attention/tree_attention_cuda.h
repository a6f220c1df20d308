// CUDA launchers of tree_attention.h. Pointers are of the device; launch errors are left to cudaGetLastError.
// T: BFloat16Bits or float; sums, log-sum-exp and gradients of keys and values are fp32.
//
// bf16 heads of up to 128 are multiplied by the tensor cores, all else by plain fp32 arithmetic. Gradients of
// queries and those of keys come from a kernel each, which computes the scores anew: seven products instead
// of five, but no atomics and no fp32 copy of the queries' gradient, and the same input gives the same bits.
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

constexpr int64_t kTreeAttentionMaxHeadDim = 256;  // of these kernels

// Shared memory that a block needs at most; wide heads need more than some GPUs have.
int64_t tree_attention_shared_bytes(int64_t head_dim);

template <class T>
struct TreeAttentionCuda {
  const T* q;                  // [num_tokens, num_heads, head_dim]
  const T *k, *v;              // [num_tokens, num_groups, head_dim]
  const T *k_stack, *v_stack;  // [num_stack, num_groups, head_dim]
  const int32_t* end_local;    // [num_stack + num_tokens]
  const int32_t* spans;        // key_spans.h; within the kernels those of their tile size
  int64_t num_tokens, num_stack, num_heads, num_groups, head_dim;
  float scale;
};

template <class T>
void tree_attention_forward_cuda(const TreeAttentionCuda<T>& in, T* o, float* lse, CudaStream stream);

// Number of parts that the sums of d_k and d_v over the heads of a group are cut into, for bf16 where there
// are few keys and groups; else 1. A function of the sizes alone, so that the order of the sums is the same
// on every device.
template <class T>
int64_t tree_attention_num_parts(int64_t num_stack, int64_t num_tokens, int64_t num_heads,
                                 int64_t num_groups);

template <class T>
struct TreeAttentionCudaGradient {
  const T *d_o, *o;         // q's shape
  const float* lse;         // [num_tokens, num_heads]
  float *dots, *log2_sums;  // scratch, [num_heads, num_tokens] each: D, and lse to base 2
  float* parts;      // scratch, num_parts · 2 · (d_k_stack's size + d_k's); null where num_parts is 1
  T* d_q;            // overwritten
  float *d_k, *d_v;  // overwritten
  float *d_k_stack, *d_v_stack;  // added to
};

template <class T>
void tree_attention_backward_cuda(const TreeAttentionCuda<T>& in,
                                  const TreeAttentionCudaGradient<T>& gradient, CudaStream stream);

}  // namespace bough
