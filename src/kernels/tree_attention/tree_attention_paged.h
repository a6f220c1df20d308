// Tree attention with the kernel of generation (kernels/paged_attention). The keys and values of each query's
// path are stored in pages. A query visits the keys of its path in ascending order of position, kPageTokens
// at a time from position 0. A token's output is therefore bit-identical in every plan and in generation.
#pragma once

#include <span>
#include <vector>

#include "kernels/paged_attention/paged_attention.h"
#include "kernels/tree_attention/tree_attention.h"

namespace bough {

// The paths of a pass in pages, and one PagedPlan for all layers. All keys of a page are on one path. If
// paths branch inside a page, the second branch gets a new page with a copy of the common keys.
class TreePages {
 public:
  // end_local: int32 [P + T] on the CPU, as in TreeAttentionInput. Throws InternalError if it is not.
  TreePages(const at::Tensor& end_local, int64_t num_stack, int64_t num_kv_heads);
  TreePages(TreePages&&) = default;  // segments() stays valid: a move keeps the memory of tables_
  TreePages& operator=(TreePages&&) = default;

  int64_t num_pages() const { return static_cast<int64_t>(key_of_slot_.size()) / kPageTokens; }
  // Slots in the pages: of the keys of the stack, and of the keys of the pass.
  std::span<const TokenSlot> stack_slots() const { return stack_slots_; }
  std::span<const TokenSlot> own_slots() const { return own_slots_; }
  const PagedPlan& plan() const { return plan_; }
  // The queries of the pass in order, with the pages of their paths. This object owns the spans' memory.
  std::span<const PagedSegment> segments() const { return segments_; }

 private:
  void append(int32_t key);
  void close_segment(int64_t end);

  std::vector<int32_t> key_of_slot_;  // index into end_local, for each slot of each page; -1 if empty
  std::vector<TokenSlot> stack_slots_, own_slots_;
  PagedPlan plan_;
  std::vector<std::vector<int32_t>> tables_;  // page tables of the segments
  std::vector<PagedSegment> segments_;
  // State while the constructor builds the pages: keys and pages of the current path, and the first position
  // of the unfinished segment.
  std::vector<int32_t> path_, table_;
  int64_t segment_begin_ = 0;
};

// Returns the pages of one layer, filled with the keys and values of stack and pass.
at::Tensor fill_pages(const TreeAttentionInput& in, const TreePages& pages);

// Paged attention of the queries to filled pages. plan: made from pages.segments() of the same pass.
TreeAttentionOutput attend_to_pages(const TreeAttentionInput& in, const at::Tensor& layer_pages,
                                    const PagedPlan& plan);

// Computes the same as tree_attention_forward, on the CPU. `pages` must be built from in.end_local. Throws
// InternalError if the inputs do not fit.
TreeAttentionOutput tree_attention_forward_paged(const TreeAttentionInput& in, const TreePages& pages);

}  // namespace bough
