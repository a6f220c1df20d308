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
// are in the accumulator type, summed in an order that does not depend on what else is chosen beside them; on
// CUDA, where fp32 and bf16 are computed, in another order than on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "kernels/paged_attention/paged_plan.h"

namespace bough {

// kExact: no pages are chosen, but keys by their own scores (top_keys.h); there are no summaries.
enum class PageSummary { kMean, kMinMax, kExact };
PageSummary page_summary(const std::string& name);  // mean, minmax, exact; InternalError for another

inline constexpr int64_t kLeastPages = 4;  // of a budget: those always kept, and one by its score

// How drawn tokens attend.
struct SparsePolicy {
  int64_t budget_pages = 0;  // that a drawn token attends to; 0: to all
  PageSummary summary = PageSummary::kMean;
  int64_t dense_layers = 0;  // the first of the model, which attend to all
  // Budgets of longer contexts, by the tokens, the query's own among them, from which on they hold; they
  // grow.
  std::map<int64_t, int64_t> larger_budgets = {};
  bool keeps_choices = false;  // generation keeps what was chosen, for training

  bool is_sparse() const { return budget_pages > 0; }
  bool has_summaries() const { return is_sparse() && summary != PageSummary::kExact; }
  // Pages that a query with so many tokens in its context attends to.
  int64_t budget_of(int64_t context_tokens) const;
  int64_t largest_budget() const {
    return larger_budgets.empty() ? budget_pages : larger_budgets.rbegin()->second;
  }
  // Of a query's pages those that are not always kept: what its list has between the first page and the last
  // two.
  static int64_t chosen_of(int64_t budget) { return budget - (kLeastPages - 1); }
};

// A layer's summaries: [B, G, 1 or 2, padded H] in the keys' type, zeros from H on.
std::vector<int64_t> summary_sizes(PageSummary summary, int64_t num_pages, int64_t num_kv_heads,
                                   int64_t head_dim);

// Writes the summaries of `complete` pages, all of whose keys are stored. pages: a layer's
// (kernels/paged_attention/paged_attention.h).
void summarise_pages(const at::Tensor& pages, std::span<const int32_t> complete, PageSummary summary,
                     int64_t head_dim, const at::Tensor& summaries);

// A query that attends by choice.
struct ChoosingQuery {
  int64_t token = 0;               // of q
  std::span<const int32_t> pages;  // of its context, in order, its own token's last
  int64_t budget = 0;              // pages that it keeps
  int64_t position = 0;            // of its own token
};

// Sets lists[i · G + g] to the indices, ascending, of the pages that query i keeps for key/value head g:
// its budget of them, or all where there are no more. q_TNH: last dimension contiguous; N a multiple of G.
// On CUDA it waits for the device. InternalError where a budget is below kLeastPages, or shapes disagree.
void choose_pages(const at::Tensor& q_TNH, const at::Tensor& summaries, PageSummary summary,
                  std::span<const ChoosingQuery> queries, std::span<std::vector<int32_t>> lists);

// The queries of a pass, and the pages that they choose in one layer after the other: what generation and
// training have in common.
class PageChooser {
 public:
  // Lists by (choosing query · G + key/value head), as choose_pages() gives them.
  using Lists = std::vector<std::vector<int32_t>>;

  // Segments: of the pass; what they point to must outlive this object. is_drawn: of each of their tokens;
  // those attend by choice where they see more pages than the policy's budget.
  PageChooser(std::span<const PagedSegment> segments, std::span<const uint8_t> is_drawn,
              const SparsePolicy& policy, int64_t num_kv_heads);

  bool chooses() const { return !queries_.empty(); }
  const SparsePolicy& policy() const { return policy_; }
  // The pass's tokens again, each that chooses as a segment of its own.
  const std::vector<PagedSegment>& segments() const { return segments_; }
  const std::vector<size_t>& choosing() const { return choosing_; }  // of them, ascending
  const std::vector<ChoosingQuery>& queries() const { return queries_; }
  // Over all drawn tokens: the pages that they attend to, in a layer and head, and those of their contexts.
  int64_t pages_read() const { return pages_read_; }
  int64_t pages_in_context() const { return pages_in_context_; }

  // What q of a layer chooses.
  Lists choose(const at::Tensor& q_TNH, const at::Tensor& summaries) const;
  // The selection for a plan of segments(); valid until the next call.
  PageSelection selection(const Lists& chosen);

 private:
  SparsePolicy policy_;
  size_t num_kv_heads_;
  std::vector<PagedSegment> segments_;
  std::vector<size_t> choosing_;
  std::vector<ChoosingQuery> queries_;
  Lists lists_;  // of segments()
  int64_t pages_read_ = 0, pages_in_context_ = 0;
};

}  // namespace bough
