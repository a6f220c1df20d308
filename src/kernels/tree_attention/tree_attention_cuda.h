// Launchers of the CUDA kernels of tree_attention.h (cuda_launch.h). T is BFloat16Bits or float. Sums,
// log-sum-exp and gradients of keys and values are fp32.
// A "group" is the query heads that share one key/value head.
//
// bf16 heads whose size is a multiple of 8 use the tensor cores, all others plain fp32 arithmetic. Backward
// has one kernel for d_q and one for d_k and d_v (heads wider than 128: one for each). All recompute the
// scores. This costs seven matrix products instead of five (wide heads: eight), but needs no atomics and no
// fp32 copy of d_q. The same input gives bit-identical results.
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

constexpr int64_t kTreeAttentionMaxHeadDim = 256;  // limit of these kernels

// Returns the shared memory in bytes of a thread block of the kernel that needs the most. Wide heads in plain
// arithmetic need more than some GPUs have. tensor_cores: whether the tensor cores are used if the head's
// size allows it.
int64_t tree_attention_shared_bytes(int64_t head_dim, bool tensor_cores);

template <class T>
struct TreeAttentionCuda {
  const T* q;                  // [num_tokens, num_heads, head_dim]
  const T *k, *v;              // [num_tokens, num_groups, head_dim]
  const T *k_stack, *v_stack;  // [num_stack, num_groups, head_dim]
  const int32_t* end_local;    // [num_stack + num_tokens]
  const int32_t* spans;        // key_spans.h; inside a kernel, from the first span of its tile size on
  int64_t num_tokens, num_stack, num_heads, num_groups, head_dim;
  float scale;
  bool tensor_cores;  // false: plain fp32 arithmetic, also for bf16
};

template <class T>
void tree_attention_forward_cuda(const TreeAttentionCuda<T>& in, T* o, float* lse, CudaStream stream);

// Returns the number of parts into which the query heads of a group are divided when d_k and d_v are summed.
// It is above 1 only for bf16 with few keys and groups. It depends on the sizes alone, so that the order of
// the sums is the same on every device.
template <class T>
int64_t tree_attention_num_parts(int64_t num_stack, int64_t num_tokens, int64_t num_heads,
                                 int64_t num_groups);

template <class T>
struct TreeAttentionCudaGradient {
  const T *d_o, *o;         // q's shape
  const float* lse;         // [num_tokens, num_heads]
  float *dots, *log2_sums;  // scratch, [num_heads, num_tokens] each: D, and lse in base 2
  float* parts;      // scratch, num_parts · 2 · (elements of d_k_stack and d_k); nullptr if num_parts is 1
  T* d_q;            // overwritten
  float *d_k, *d_v;  // overwritten
  float *d_k_stack, *d_v_stack;  // the gradients are added to these
};

template <class T>
void tree_attention_backward_cuda(const TreeAttentionCuda<T>& in,
                                  const TreeAttentionCudaGradient<T>& gradient, CudaStream stream);

}  // namespace bough
