// Plans which tokens of a pass visit which pages together, so that a page that several sequences list is read
// once for all of them. The plan depends on the segments and the selection only. The results are tasks for
// CPU threads, or items for CUDA thread blocks (paged_work.h).
//
// A row is one query token and its list of pages. Only this file uses positions. Kernels number keys by their
// place in a row's list: page i of the list has keys 16 i to 16 i + 15, and a row sees the keys below its
// limit. Lists ascend, and every page that a row sees is full, except the last one. The keys below the limit
// are therefore all keys of these pages up to the row's position.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/paged_attention/paged_work.h"
#include "kernels/paged_attention/pages.h"

namespace bough {

// Tokens at positions begin to begin + count - 1 of one sequence. The pages already have the keys and values
// of all earlier positions.
struct PagedSegment {
  std::span<const int32_t>
      pages;  // pages of the sequence in ascending order of positions, those of these tokens included
  int64_t begin = 0;
  int64_t count = 0;
  // Position of each page's first key; neighbours differ by at least kPageTokens. Empty means 0, 16, 32, ...
  std::span<const int32_t> first_keys = {};
};

// The pages that the tokens of each segment attend to, as ascending indices into the segment's `pages`. The
// pages that hold the segment's tokens must be selected.
struct PageSelection {
  // lists[s] are the pages of segment s. If per_head, lists[s · G + g] are those of key/value head g.
  std::span<const std::vector<int32_t>> lists;
  bool per_head = false;
  // By list and page: the keys of the page that are attended to (kAllKeys). Empty: all keys. CPU only.
  std::span<const std::vector<uint16_t>> masks = {};
};

// The page list of a segment, or only the selected pages of it.
class PageList {
 public:
  // Throws InternalError if the list does not ascend or lacks the page of a token of the segment. selected:
  // nullptr if all pages are selected. Keeps references to both arguments.
  PageList(const PagedSegment& segment, const std::vector<int32_t>* selected);

  int64_t size() const {
    return static_cast<int64_t>(selected_ ? selected_->size() : segment_->pages.size());
  }
  int32_t page(int64_t i) const { return segment_->pages[index(i)]; }
  int64_t first_key(int64_t i) const {
    return segment_->first_keys.empty() ? static_cast<int64_t>(index(i)) * kPageTokens
                                        : segment_->first_keys[index(i)];
  }
  // The number of the list's keys at positions below `position`.
  int64_t keys_below(int64_t position) const;
  // The slot of one of the segment's tokens: page · kPageTokens + place in the page.
  int32_t slot(int64_t position) const;

 private:
  size_t index(int64_t i) const {
    return static_cast<size_t>(selected_ ? (*selected_)[static_cast<size_t>(i)] : i);
  }

  const PagedSegment* segment_;
  const std::vector<int32_t>* selected_;
};

// The tasks of the CPU's threads. One thread computes one task at a time. A task has rows, and the runs in
// which its rows visit pages together.
struct PagedSchedule {
  std::vector<AttentionRow> rows;
  std::vector<AttentionRun> runs;
  std::vector<AttentionTask> tasks;  // each for one key/value head, or each for all
  std::vector<int32_t> slots;        // slot of each token
  std::vector<int32_t> pages;        // page lists of the rows
  std::vector<int32_t> masks;        // of these pages (PageSelection::masks); empty: all keys

  // Returns the schedule as one int32 tensor on the CPU, the op's argument `work`. ScheduleView reads it.
  at::Tensor as_tensor() const;
};
// Plans a pass whose tokens are those of the segments, in order. A task has at most `max_rows` decode rows.
// More rows per task save reads of pages; more tasks allow more threads. Throws InternalError if PageList
// does or if the selection has too few or too many lists.
PagedSchedule schedule_paged(std::span<const PagedSegment> segments, int64_t num_kv_heads,
                             const PageSelection* selection, int64_t max_rows);
// Plans a pass with max_rows chosen so that the current number of threads get about equally long tasks.
PagedSchedule schedule_paged_for_threads(std::span<const PagedSegment> segments, int64_t num_kv_heads,
                                         const PageSelection* selection = nullptr);

struct ScheduleView {
  std::span<const AttentionRow> rows;
  std::span<const AttentionRun> runs;
  std::span<const AttentionTask> tasks;
  std::span<const int32_t> slots;
  const int32_t* pages;
  const int32_t* masks;  // nullptr: all keys

  explicit ScheduleView(const at::Tensor& work);  // must outlive the view
};

// The items of the CUDA thread blocks (paged_work.h).
//
// Decode rows whose lists begin with the same pages, such as the samples of a prompt, get one item for these
// pages. A page that k decode rows list is then read once for all of them, if this saves more than merging
// the parts costs. Cascade attention does the same; here common prefixes may form a tree of any depth.
// Prefill tokens are divided into items of as many tokens as fit in a thread block. Items with many pages are
// then cut, so that all multiprocessors are busy even with few rows and long contexts.
struct PagedWork {
  std::vector<PagedItem> large, small;  // longest first
  std::vector<PagedRow> rows;
  std::vector<PagedMerge> merges;
  std::vector<int32_t> slots, pages;
  int64_t num_parts = 0;
  bool per_head = false;

  // The layout whose capacities are exactly the sizes of the lists above.
  PagedLayout layout() const;
  bool fits(const PagedLayout& capacities) const;
  // Writes layout.pages() + pages.size() numbers to `to`. Slots beyond the tokens of the pass become -1.
  // Throws InternalError if a list exceeds the layout's capacity.
  void write(int32_t* to, const PagedLayout& layout) const;
};

PagedWork plan_paged_work(std::span<const PagedSegment> segments, int64_t num_heads, int64_t num_kv_heads,
                          const PageSelection* selection = nullptr);

// A segment of one token that attends to `num_pages` of its pages for each key/value head, the last of them
// its own. The device chooses the pages after the work was planned.
struct OpenSegment {
  size_t segment = 0;  // index in the pass's segments
  int64_t num_pages = 0;
};
// Work in which tables of pages are left open. All slots are -1: keys and values must be stored before.
struct OpenPagedWork {
  PagedWork work;
  // The table of open segment i and head g begins at work.pages[tables[i · G + g]] and has `num_pages` ids,
  // in the order of their positions.
  std::vector<int32_t> tables;
};
// open: ascending. Pages that open segments have in common are read once for each, since they are not known.
OpenPagedWork plan_open_paged_work(std::span<const PagedSegment> segments, std::span<const OpenSegment> open,
                                   int64_t num_heads, int64_t num_kv_heads);

}  // namespace bough
