// CUDA launchers of paged_attention.h. Pointers are of the device; launch errors are left to
// cudaGetLastError. T: BFloat16Bits or float; scores, sums and parts are fp32.
//
// bf16 heads of up to 128 whose width is a multiple of 8 are multiplied by the tensor cores: all heads of a
// group and all rows of an item share each load of a page (up to 16 query vectors: the four warps take
// different keys; up to 64: different queries). All else is plain fp32 arithmetic. No atomics: the same work
// gives the same bits.
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
  T* o;              // [T, N, H]; rows that the work does not name are left alone
  const int32_t* work;
  PagedLayout layout;
  float* parts;      // [parts, N, H]
  float* part_sums;  // [parts, N, 2]: largest score · scale · log2(e), and the sum of weights to that base
  int64_t num_tokens, num_heads, num_groups, head_dim;
  float scale;
};

// Stores k and v in the pages, then attends.
template <class T>
void paged_attention_cuda(const PagedAttentionCuda<T>& in, CudaStream stream);

}  // namespace bough
