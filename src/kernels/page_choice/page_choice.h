// Block top-k attention: which pages of its context a query attends to (papers: DistillSparse, section 4;
// Quest). A page of a key/value head has a summary, made of its 16 keys when the last of them is stored; a
// query scores a page by its summary, and the pages with the highest scores are attended to.
//
//   mean:   s[h] = mean of the keys' k[h],                   score = q̄ · s
//   minmax: lo[h], hi[h] = smallest, largest of k[h],        score = sum_h max(q̄[h] lo[h], q̄[h] hi[h])
//   q̄ = mean of the queries of the head's group
//
// The first page and the last two, the one that the query's own token lies in among them, are always kept,
// inside the budget; of equal scores the lower page is. A query that sees no more pages than the budget keeps
// all. Keys are those that attention reads, after rotation; summaries are rounded to the keys' type, scores
// are in the accumulator type, summed in an order that does not depend on what else is chosen beside them.
//
// On the CPU only: who chooses on another device says so.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace bough {

enum class PageSummary { kMean, kMinMax };
PageSummary page_summary(const std::string& name);  // mean, minmax; InternalError for another

inline constexpr int64_t kLeastPages = 4;  // of a budget: those always kept, and one by its score

// A layer's summaries: [B, G, 1 or 2, padded H] in the keys' type, zeros from H on.
std::vector<int64_t> summary_sizes(PageSummary summary, int64_t num_pages, int64_t num_kv_heads,
                                   int64_t head_dim);

// Writes the summaries of `complete` pages, all of whose keys are stored. pages: a layer's on the CPU
// (kernels/paged_attention/pages.h).
void summarise_pages(const at::Tensor& pages, std::span<const int32_t> complete, PageSummary summary,
                     int64_t head_dim, const at::Tensor& summaries);

// A query that attends by choice.
struct ChoosingQuery {
  int64_t token = 0;               // of q
  std::span<const int32_t> pages;  // of its context, in order, its own token's last
};

// Sets lists[i · G + g] to the indices, ascending, of the pages that query i keeps for key/value head g:
// budget of them, or all where there are no more. q_TNH: last dimension contiguous; N a multiple of G.
// InternalError where budget is below kLeastPages, or shapes disagree.
void choose_pages(const at::Tensor& q_TNH, const at::Tensor& summaries, PageSummary summary,
                  std::span<const ChoosingQuery> queries, int64_t budget,
                  std::span<std::vector<int32_t>> lists);

}  // namespace bough
