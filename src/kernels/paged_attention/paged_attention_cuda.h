// Launchers of the CUDA kernels of paged_attention.h (cuda_launch.h). T is BFloat16Bits or float.
// Scores, sums and parts are fp32.
//
// The tensor cores compute bf16 heads whose size is a multiple of 8. Each page of an item
// (paged_work.h) is loaded once for all rows of the item and all query heads of the key/value head. With up
// to 16 query vectors, the four warps of a CUDA thread block compute different keys, otherwise different
// query vectors. Other heads use plain fp32 arithmetic. Without atomics, the same PagedWork gives the same
// bits.
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"
#include "kernels/paged_attention/paged_work.h"

namespace bough {

constexpr int64_t kPagedAttentionMaxHeadDim = 256;

template <class T>
struct PagedAttentionCuda {
  const T* q;        // [T, N, H]
  const T *k, *v;    // [T, G, H], of the pass's tokens
  T *keys, *values;  // [pages, G, 16, H]
  T* o;              // [T, N, H]; tokens without an item are not written
  const int32_t* work;
  PagedLayout layout;
  float* parts;      // [parts, N, H]
  float* part_sums;  // [parts, N, 2]: largest score · scale · log2(e), sum of weights relative to it
  int64_t num_tokens, num_heads, num_groups, head_dim;
  float scale;
  bool tensor_cores;  // false: plain fp32 arithmetic, also for bf16
};

// Stores k and v in the pages, then attends.
template <class T>
void paged_attention_cuda(const PagedAttentionCuda<T>& in, CudaStream stream);

}  // namespace bough
