// Which tokens of a pass visit which pages together, so that pages that several sequences hold are read once
// for all of them: pure functions of the segments, as tasks for the CPU's threads and as work for a GPU's
// blocks (paged_work.h).
//
// Positions matter here only. What kernels get counts keys by their place in a row's list of pages: page i of
// the list has keys 16 i ... 16 i + 15, and a row sees the keys below its limit. As lists ascend and pages
// are whole but the last that a row sees, these are the keys up to its position.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/paged_attention/paged_work.h"
#include "kernels/paged_attention/pages.h"

namespace bough {

// Tokens at positions begin ... begin + count - 1 of one sequence. Keys and values of the positions before
// `begin` are stored already.
struct PagedSegment {
  std::span<const int32_t>
      pages;  // any of the sequence's, in ascending order of positions, with room for these tokens
  int64_t begin = 0;
  int64_t count = 0;
  // Position of each page's first key, at least kPageTokens apart; empty: 0, 16, 32, ...
  std::span<const int32_t> first_keys = {};
};

// The pages that a segment's tokens attend to: ascending indices into its list, those of its own tokens among
// them.
struct PageSelection {
  // The pages of segment s are lists[s], or where heads differ, of key/value head g, lists[s · G + g].
  std::span<const std::vector<int32_t>> lists;
  bool per_head = false;
};

// A segment's list of pages, or what is selected of it.
class PageList {
 public:
  // InternalError where the list does not ascend, or has no page of some of the segment's tokens.
  PageList(const PagedSegment& segment, const std::vector<int32_t>* selected);

  int64_t size() const {
    return static_cast<int64_t>(selected_ ? selected_->size() : segment_->pages.size());
  }
  int32_t page(int64_t i) const { return segment_->pages[index(i)]; }
  int64_t first_key(int64_t i) const {
    return segment_->first_keys.empty() ? static_cast<int64_t>(index(i)) * kPageTokens
                                        : segment_->first_keys[index(i)];
  }
  // How many of the list's keys lie at positions below `position`.
  int64_t keys_below(int64_t position) const;
  // Where the key of one of the segment's tokens goes: page · kPageTokens + place in it.
  int32_t slot(int64_t position) const;

 private:
  size_t index(int64_t i) const {
    return static_cast<size_t>(selected_ ? (*selected_)[static_cast<size_t>(i)] : i);
  }

  const PagedSegment* segment_;
  const std::vector<int32_t>* selected_;
};

// What the CPU's threads do. Rows, and the runs that they take together, are a task: what a thread does at
// once.
struct PagedSchedule {
  std::vector<AttentionRow> rows;
  std::vector<AttentionRun> runs;
  std::vector<AttentionTask> tasks;  // all of one head, or all of every head
  std::vector<int32_t> slots;        // of each token
  std::vector<int32_t> pages;        // the rows' lists

  // The schedule as one int32 tensor on the CPU, which the op takes and ScheduleView reads.
  at::Tensor as_tensor() const;
};
// Plans a pass, whose tokens are those of the segments, in order. At most `max_rows` decode rows a task: a
// task's rows share reads, but only tasks run in parallel.
PagedSchedule schedule_paged(std::span<const PagedSegment> segments, int64_t num_kv_heads,
                             const PageSelection* selection, int64_t max_rows);
// Plans a pass with as many decode rows a task as let this many threads and key/value heads even out.
PagedSchedule schedule_paged_for_threads(std::span<const PagedSegment> segments, int64_t num_kv_heads,
                                         const PageSelection* selection = nullptr);

struct ScheduleView {
  std::span<const AttentionRow> rows;
  std::span<const AttentionRun> runs;
  std::span<const AttentionTask> tasks;
  std::span<const int32_t> slots;
  const int32_t* pages;

  explicit ScheduleView(const at::Tensor& work);  // must outlive the view
};

// What the blocks of the CUDA kernels do.
//
// Samples of a group and other sequences with a common prefix are one item over its pages: a page that k
// decode rows share is read once for all of them, where that saves more than joining the parts costs (as
// cascade attention does, over a tree of any depth). Tokens of a prefill are items of as many as a block
// takes. Then items of many pages are cut, so that every multiprocessor has work also where there are few
// rows and long contexts.
struct PagedWork {
  std::vector<PagedItem> large, small;  // the longest first
  std::vector<PagedRow> rows;
  std::vector<PagedMerge> merges;
  std::vector<int32_t> slots, pages;
  int64_t num_parts = 0;
  bool per_head = false;

  // The layout of this work, with no room to spare.
  PagedLayout layout() const;
  bool fits(const PagedLayout& capacities) const;
  // Writes layout.pages() + pages.size() numbers. `to` has room for them; tokens that the pass lacks get slot
  // -1.
  void write(int32_t* to, const PagedLayout& layout) const;
};

PagedWork plan_paged_work(std::span<const PagedSegment> segments, int64_t num_heads, int64_t num_kv_heads,
                          const PageSelection* selection = nullptr);

}  // namespace bough
