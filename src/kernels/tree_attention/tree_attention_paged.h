// Tree attention by the kernel that generation uses (kernels/paged_attention): each query's path in pages,
// its keys visited in ascending order of position, kPageTokens at a time from position 0. The output of a
// token is then the same bits in every plan, and in generation.
#pragma once

#include <span>
#include <vector>

#include "kernels/paged_attention/paged_attention.h"
#include "kernels/tree_attention/tree_attention.h"

namespace bough {

// The paths of a pass in pages: one plan for all layers. A page holds keys of one path; where paths part
// inside a page, the second branch gets a page of its own with the common keys copied.
class TreePages {
 public:
  // end_local: int32 [P + T], CPU, as TreeAttentionInput has it.
  TreePages(const at::Tensor& end_local, int64_t num_stack, int64_t num_kv_heads);
  TreePages(TreePages&&) = default;  // a move leaves the tables where they are
  TreePages& operator=(TreePages&&) = default;

  int64_t num_pages() const { return static_cast<int64_t>(key_of_slot_.size()) / kPageTokens; }
  // Where keys lie, by page and place: those of the stack, those of the pass.
  std::span<const TokenSlot> stack_slots() const { return stack_slots_; }
  std::span<const TokenSlot> own_slots() const { return own_slots_; }
  const PagedPlan& plan() const { return plan_; }
  // The queries, in order, with their paths' pages; spans of this object.
  std::span<const PagedSegment> segments() const { return segments_; }
  std::vector<int32_t> complete_pages() const;  // all of whose places hold a key

 private:
  void append(int32_t key);
  void close_segment(int64_t end);

  std::vector<int32_t> key_of_slot_;  // of each page's slots, an index into end_local; -1 where none is
  std::vector<TokenSlot> stack_slots_, own_slots_;
  PagedPlan plan_;
  std::vector<std::vector<int32_t>> tables_;  // of the segments
  std::vector<PagedSegment> segments_;
  // State while the pages are built: the keys and pages of the present path, and where its open segment
  // began.
  std::vector<int32_t> path_, table_;
  int64_t segment_begin_ = 0;
};

// A layer's pages with the keys and values of stack and pass in them.
at::Tensor fill_pages(const TreeAttentionInput& in, const TreePages& pages);

// Paged attention of the queries over filled pages, by a plan of their segments.
TreeAttentionOutput attend_to_pages(const TreeAttentionInput& in, const at::Tensor& layer_pages,
                                    const PagedPlan& plan);

// Computes what tree_attention_forward does, on the CPU. `pages` must be of in.end_local.
TreeAttentionOutput tree_attention_forward_paged(const TreeAttentionInput& in, const TreePages& pages);

}  // namespace bough
