// What paged attention's CUDA kernels do in one pass (kernels/paged_attention/paged_work.h): a pure function of the
// segments and the model's heads.
//
// Samples of a group and other sequences with a common prefix are one item over its pages: a page that k decode rows
// share is read once for all of them, where that saves more than joining the parts costs (as cascade attention does,
// over a tree of any depth). Tokens of a prefill are items of as many as a block takes. Then items of many pages are
// cut, so that every multiprocessor has work also where there are few rows and long contexts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/paged_attention/paged_work.h"
#include "rollout/paged_attention.h"

namespace bough {

struct AttentionWork {
  std::vector<PagedItem> large, small;  // the longest first
  std::vector<PagedRow> rows;
  std::vector<PagedMerge> merges;
  std::vector<int32_t> slots, pages;
  int64_t num_parts = 0;

  // With no room to spare.
  PagedLayout layout() const;
  bool fits(const PagedLayout& capacities) const;
  // layout.pages() + pages.size() numbers. `to` has room for them; tokens that the pass lacks get slot -1.
  void write(int32_t* to, const PagedLayout& layout) const;
};

AttentionWork plan_attention_work(std::span<const Segment> segments, int64_t num_heads, int64_t num_groups);

}  // namespace bough
