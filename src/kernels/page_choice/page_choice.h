// Block top-k attention: a query attends only to the blocks of its context with the highest scores (papers:
// DistillSparse, section 4; Quest). sparse_policy.h says what a block is and which blocks are always kept.
// Each block has a summary per key/value head, computed from the block's keys when the last of them is
// stored. A query scores a block by its summary.
//
//   mean:   s[h] = mean of the keys' k[h],                   score = q̄ · s
//   minmax: lo[h], hi[h] = smallest, largest of k[h],        score = sum_h max(q̄[h] lo[h], q̄[h] hi[h])
//   q̄ = mean of the query over the query heads that share the key/value head
//
// If scores are equal, the block that comes first in the context is kept.
//
// Keys are those that attention reads, after the rotary embedding. Summaries are rounded to the keys' dtype.
// Scores are in the accumulator type, and the order of their sums does not depend on other queries. CUDA
// supports fp32 and bf16 and policies with is_by_pages(), and sums scores in another order than the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/page_choice/sparse_policy.h"

namespace bough {

// Sizes of a layer's summaries: [B · parts_per_page(), G, 1 (mean) or 2 (minmax), padded H] in the keys'
// dtype, zeros from H on. B: pages. padded H: padded_head_dim() in kernels/paged_attention/pages.h. The
// summary of a block is stored at the number of its last part.
std::vector<int64_t> summary_sizes(const SparsePolicy& policy, int64_t num_pages, int64_t num_kv_heads,
                                   int64_t head_dim);

// Writes the summaries of blocks. complete: the blocks' parts (completed_blocks()). All keys of these parts
// must be stored. pages: the tensor of one layer's pages (kernels/paged_attention/paged_attention.h). Throws
// InternalError if a tensor does not fit.
void summarise_blocks(const at::Tensor& pages, std::span<const int32_t> complete, const SparsePolicy& policy,
                      int64_t head_dim, const at::Tensor& summaries);

// A query that chooses the blocks it attends to.
struct ChoosingQuery {
  int64_t token = 0;               // index into the first dimension of q_TNH
  std::span<const int32_t> pages;  // ids of the context's pages in order; the last holds its own token
  int64_t budget = 0;              // number of blocks that it keeps
  int64_t position = 0;            // position of its own token
};

// Sets lists[i · G + g] to the ascending numbers of the blocks that query i keeps for key/value head g: as
// many as its budget, or all if there are no more. q_TNH: last dimension contiguous; N a multiple of G. On
// CUDA, waits for the device. Throws InternalError if a budget is below policy.least_budget() or an input
// does not fit.
void choose_blocks(const at::Tensor& q_TNH, const at::Tensor& summaries, const SparsePolicy& policy,
                   std::span<const ChoosingQuery> queries, std::span<std::vector<int32_t>> lists);

// summarise_blocks() for pages on CUDA, without waiting for the device. complete_C: int32 [C], also on CUDA.
void summarise_pages(const at::Tensor& pages, const at::Tensor& complete_C, BlockSummary summary,
                     int64_t head_dim, const at::Tensor& summaries);

// Chooses pages on CUDA for the same queries in one layer after another, without waiting for the device. The
// policy must have is_by_pages(). Each query must have more pages than its budget.
class DevicePageChooser {
 public:
  // Does not keep references to the queries. tables: a query's table of page ids for each key/value head
  // begins at this index of choose()'s `ids` ([Q · G]); may be empty.
  DevicePageChooser(std::span<const ChoosingQuery> queries, std::span<const int32_t> tables,
                    at::Device device);

  // Returns the chosen indices: int32 [Q, G, longest list]. Query i has as many as it chooses by score,
  // ascending. ids: nullptr, or int32 on CUDA: the ids of all pages that the queries keep are written to
  // their tables.
  at::Tensor choose(const at::Tensor& q_TNH, const at::Tensor& summaries, BlockSummary summary,
                    const at::Tensor* ids = nullptr) const;

 private:
  at::Tensor queries_Q4_, pages_, tables_;
  int64_t most_pages_ = 0, most_kept_ = 0;
};
// Sets lists[i · G + g] as choose_blocks() does. chosen_QGK: a result of DevicePageChooser, on the CPU.
void complete_lists(const at::Tensor& chosen_QGK, std::span<const ChoosingQuery> queries,
                    std::span<std::vector<int32_t>> lists);

}  // namespace bough
