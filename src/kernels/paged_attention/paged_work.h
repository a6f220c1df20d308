// The work of the CUDA kernels of paged attention in one pass: integers in one array, which goes to the
// device in one copy. paged_plan.h fills it. No torch.
//
// A row is one query token. An item is a set of rows and consecutive pages that all of them attend to. One
// CUDA thread block computes one item for one key/value head. If heads attend to different pages, each item
// is for one head. Keys are numbered by their place in the row's list of pages, 16 per page. If a row is in
// one item only, the item writes the row's output. Otherwise each item writes a part (undivided sums, largest
// score, sum of weights), and a merge joins the row's parts in the order of their keys.
//
// For given capacities, the sections of the array begin at fixed indices, so that a captured CUDA graph finds
// the items of each pass at the same addresses. Kernels do not read records beyond the counts in the header.
#pragma once

#include <cstdint>

namespace bough {

constexpr int kPagedSmallEntries =
    16;  // most entries (row, query head) of a small item and one key/value head: one tensor-core fragment
constexpr int kPagedLargeEntries = 64;  // of a large item: a fragment per warp; a single row may exceed it
constexpr int kPagedPageTokens = 16;

struct alignas(16) PagedHeader {
  int32_t num_large = 0, num_small = 0, num_merges = 0, unused = 0;
};
struct alignas(16) PagedItem {
  int32_t row_begin = 0, num_rows = 0;
  int32_t page_begin = 0;  // index of the item's first page in the section `pages`
  int32_t first_key = 0;   // number of the first key of that page
  int32_t key_end = 0;     // the item's keys are below it; some row sees each key
  int32_t min_limit = 0;   // all rows see the keys below it; at most key_end
  int32_t group = -1;      // key/value head; -1: all, one thread block for each
  int32_t unused = 0;
};
struct alignas(16) PagedRow {
  int32_t token = 0;  // number in the pass
  int32_t limit = 0;  // the row sees the keys below it
  int32_t part = -1;  // index of the part to write; -1: the row is in no other item
  int32_t unused = 0;
};
struct alignas(16) PagedMerge {
  int32_t token = 0, part_begin = 0, part_end = 0;
  int32_t group = -1;  // key/value head whose query heads are merged; -1: all
};

// Capacities (largest numbers of records), and the index of each section's first int32.
struct PagedLayout {
  int64_t max_large = 0, max_small = 0, max_rows = 0, max_merges = 0, max_tokens = 0;
  bool per_head = false;  // each item is for one key/value head, else for all

  constexpr int64_t large() const { return 4; }
  constexpr int64_t small() const { return large() + 8 * max_large; }
  constexpr int64_t rows() const { return small() + 8 * max_small; }
  constexpr int64_t merges() const { return rows() + 4 * max_rows; }
  constexpr int64_t slots() const {
    return merges() + 4 * max_merges;
  }  // page · 16 + place of each token; -1: not stored
  constexpr int64_t pages() const { return slots() + max_tokens; }  // the last section: its length may vary
};

}  // namespace bough
