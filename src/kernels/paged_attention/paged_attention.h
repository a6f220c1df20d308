// Attention of one generation pass over keys and values in pages, on CUDA; what is computed: rollout/paged_attention.h,
// which also has the reference. Stores the pass's keys and values first.
//
// q [T, N, H], k and v [T, G, H]: fp32 or bf16, contiguous. keys, values: [pages, G, 16, H], contiguous. work: int32,
// as paged_work.h lays it out; its items must name pages and tokens that exist. parts: fp32, at least
// paged_parts_size() elements for the largest number of parts that the work names. H at most 256. Returns o [T, N, H];
// rows that the work does not name hold anything.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/paged_attention/paged_work.h"

namespace bough {

struct PagedAttentionInput {
  at::Tensor q_TNH, k_TGH, v_TGH, keys, values, work, parts;
  PagedLayout layout;
};

inline int64_t paged_parts_size(int64_t num_parts, int64_t num_heads, int64_t head_dim) {
  return num_parts * num_heads * (head_dim + 2);
}

at::Tensor paged_attention(const PagedAttentionInput& in);

}  // namespace bough
