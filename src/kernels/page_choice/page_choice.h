// Block top-k attention: a query attends only to the pages of its context with the highest scores (papers:
// DistillSparse, section 4; Quest). Each page has a summary per key/value head, computed from the page's 16
// keys when the last of these keys is stored. A query scores a page by its summary.
//
//   mean:   s[h] = mean of the keys' k[h],                   score = q̄ · s
//   minmax: lo[h], hi[h] = smallest, largest of k[h],        score = sum_h max(q̄[h] lo[h], q̄[h] hi[h])
//   q̄ = mean of the query over the query heads that share the key/value head
//
// The first page and the last two pages are always kept and count against the budget. The last page has the
// query's own token. If scores are equal, the page that comes first in the context is kept. A query with no
// more pages than its budget keeps all pages.
//
// Keys are those that attention reads, after the rotary embedding. Summaries are rounded to the keys' dtype.
// Scores are in the accumulator type, and the order of their sums does not depend on other queries. CUDA
// supports fp32 and bf16, and sums scores in another order than the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "kernels/paged_attention/paged_plan.h"

namespace bough {

// kExact: the query keeps single keys by their own scores instead of pages (top_keys.h), so pages have no
// summaries.
enum class PageSummary { kMean, kMinMax, kExact };
PageSummary page_summary(const std::string& name);  // mean, minmax, exact; else throws InternalError

inline constexpr int64_t kLeastPages = 4;  // smallest budget: the pages always kept, and one chosen by score

// Settings: which pages sampled tokens attend to.
struct SparsePolicy {
  int64_t budget_pages = 0;  // pages that a sampled token attends to; 0: all
  PageSummary summary = PageSummary::kMean;
  int64_t dense_layers = 0;  // the first dense_layers layers attend to all pages
  // Maps a number of context tokens, the query's own included, to the budget in pages from this number on.
  // Budgets must not decrease.
  std::map<int64_t, int64_t> larger_budgets = {};
  bool keeps_choices = false;  // generation records the chosen pages for training

  bool is_sparse() const { return budget_pages > 0; }
  bool has_summaries() const { return is_sparse() && summary != PageSummary::kExact; }
  // Pages that a query attends to if its context, its own token included, has this many tokens.
  int64_t budget_of(int64_t context_tokens) const;
  int64_t largest_budget() const {
    return larger_budgets.empty() ? budget_pages : larger_budgets.rbegin()->second;
  }
  // How many pages of a budget are chosen by score: all but the first page and the last two.
  static int64_t chosen_of(int64_t budget) { return budget - (kLeastPages - 1); }
};

// Sizes of a layer's summaries: [B, G, 1 (mean) or 2 (minmax), padded H] in the keys' dtype, zeros from H on.
// padded H: padded_head_dim() in kernels/paged_attention/pages.h.
std::vector<int64_t> summary_sizes(PageSummary summary, int64_t num_pages, int64_t num_kv_heads,
                                   int64_t head_dim);

// Writes the summaries of the pages whose ids `complete` lists. All keys of these pages must be stored.
// pages: the tensor of one layer's pages (kernels/paged_attention/paged_attention.h). Throws InternalError if
// a tensor does not fit.
void summarise_pages(const at::Tensor& pages, std::span<const int32_t> complete, PageSummary summary,
                     int64_t head_dim, const at::Tensor& summaries);

// A query that chooses the pages it attends to.
struct ChoosingQuery {
  int64_t token = 0;               // index into the first dimension of q_TNH
  std::span<const int32_t> pages;  // ids of the context's pages in order; the last holds its own token
  int64_t budget = 0;              // number of pages that it keeps
  int64_t position = 0;            // position of its own token
};

// Sets lists[i · G + g] to the ascending indices, in queries[i].pages, of the pages that query i keeps for
// key/value head g: as many as its budget, or all if there are no more. q_TNH: last dimension contiguous; N a
// multiple of G. On CUDA, waits for the device. Throws InternalError if a budget is below kLeastPages or an
// input does not fit.
void choose_pages(const at::Tensor& q_TNH, const at::Tensor& summaries, PageSummary summary,
                  std::span<const ChoosingQuery> queries, std::span<std::vector<int32_t>> lists);

// The same for pages on CUDA, without waiting for the device. complete_C: int32 [C], also on CUDA.
void summarise_pages(const at::Tensor& pages, const at::Tensor& complete_C, PageSummary summary,
                     int64_t head_dim, const at::Tensor& summaries);

// Chooses pages on CUDA for the same queries in one layer after another, without waiting for the device. Each
// query must have more pages than its budget.
class DevicePageChooser {
 public:
  // Does not keep references to the queries. tables: a query's table of page ids for each key/value head
  // begins at this index of choose()'s `ids` ([Q · G]); may be empty.
  DevicePageChooser(std::span<const ChoosingQuery> queries, std::span<const int32_t> tables,
                    at::Device device);

  // Returns the chosen indices: int32 [Q, G, longest list]. Query i has as many as it chooses by score,
  // ascending. ids: nullptr, or int32 on CUDA: the ids of all pages that the queries keep are written to
  // their tables.
  at::Tensor choose(const at::Tensor& q_TNH, const at::Tensor& summaries, PageSummary summary,
                    const at::Tensor* ids = nullptr) const;

 private:
  at::Tensor queries_Q4_, pages_, tables_;
  int64_t most_pages_ = 0, most_kept_ = 0;
};
// Sets lists[i · G + g] as choose_pages() does. chosen_QGK: a result of DevicePageChooser, on the CPU.
void complete_lists(const at::Tensor& chosen_QGK, std::span<const ChoosingQuery> queries,
                    std::span<std::vector<int32_t>> lists);

// Chooses the pages of a pass's queries, layer by layer. Generation and training both use this class.
class PageChooser {
 public:
  // Index: number of the choosing query · G + key/value head. Contents as `lists` of choose_pages().
  using Lists = std::vector<std::vector<int32_t>>;

  // segments: those of the pass. The memory that their spans refer to must outlive this object. is_sampled:
  // for each token, whether a policy sampled it. A sampled token chooses pages if it sees more pages than its
  // budget.
  PageChooser(std::span<const PagedSegment> segments, std::span<const uint8_t> is_sampled,
              const SparsePolicy& policy, int64_t num_kv_heads);

  bool chooses() const { return !queries_.empty(); }
  const SparsePolicy& policy() const { return policy_; }
  // The tokens of the pass, in segments such that each choosing token is a segment alone.
  const std::vector<PagedSegment>& segments() const { return segments_; }
  const std::vector<size_t>& choosing() const { return choosing_; }  // ascending indices in segments()
  const std::vector<ChoosingQuery>& queries() const { return queries_; }
  // Sums over all sampled tokens, for one layer and head: pages attended to, and pages in the context.
  int64_t pages_read() const { return pages_read_; }
  int64_t pages_in_context() const { return pages_in_context_; }

  // Returns the pages that the choosing queries keep in one layer.
  Lists choose(const at::Tensor& q_TNH, const at::Tensor& summaries) const;
  // Returns the selection for a plan of segments(). The selection refers to lists in this object, which the
  // next call overwrites.
  PageSelection selection(const Lists& chosen);

 private:
  SparsePolicy policy_;
  size_t num_kv_heads_;
  std::vector<PagedSegment> segments_;
  std::vector<size_t> choosing_;
  std::vector<ChoosingQuery> queries_;
  Lists lists_;  // page lists of segments()
  int64_t pages_read_ = 0, pages_in_context_ = 0;
};

}  // namespace bough
