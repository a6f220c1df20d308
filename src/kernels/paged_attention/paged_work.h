// What the blocks of paged attention's CUDA kernels do in one pass, as integers in one array that a single
// copy brings to the device. Filled by paged_plan.h. No torch here.
//
// An item is some query rows and pages, consecutive in their lists, that all of them attend to: one block an
// item and key/value head; where heads attend to different pages, an item is of one of them. Keys count by
// their place in the row's list of pages, 16 a page. A row that one item covers is finished there; else each
// of its items leaves a part (sums not divided, largest score, sum of weights), and a merge joins the row's
// parts in the order of their keys.
//
// The sections lie at fixed places for given capacities, so that a captured graph finds the next pass's work
// where it found its own; what is beyond the counts in the header is not read.
#pragma once

#include <cstdint>

namespace bough {

constexpr int kPagedSmallEntries =
    16;  // an item's query rows times heads of a group: one fragment of the tensor cores
constexpr int kPagedLargeEntries = 64;  // a fragment for each of a block's four warps; one row may have more
constexpr int kPagedPageTokens = 16;

struct alignas(16) PagedHeader {
  int32_t num_large = 0, num_small = 0, num_merges = 0, unused = 0;
};
struct alignas(16) PagedItem {
  int32_t row_begin = 0, num_rows = 0;
  int32_t page_begin = 0;  // its first page in the section of pages
  int32_t first_key = 0;   // of that page
  int32_t key_end = 0;     // keys below it are in the pages and visible to some row
  int32_t min_limit = 0;   // all rows see the keys below it; at most key_end
  int32_t group = -1;      // key/value head; -1: all, a block each
  int32_t unused = 0;
};
struct alignas(16) PagedRow {
  int32_t token = 0;  // of the pass
  int32_t limit = 0;  // sees the keys below it
  int32_t part = -1;  // where its part goes; -1: the row is finished here
  int32_t unused = 0;
};
struct alignas(16) PagedMerge {
  int32_t token = 0, part_begin = 0, part_end = 0;
  int32_t group = -1;  // whose query heads are joined; -1: all
};

// Capacities, and where the sections begin, in int32.
struct PagedLayout {
  int64_t max_large = 0, max_small = 0, max_rows = 0, max_merges = 0, max_tokens = 0;
  bool per_head = false;  // all items are of one head each, or else of all

  constexpr int64_t large() const { return 4; }
  constexpr int64_t small() const { return large() + 8 * max_large; }
  constexpr int64_t rows() const { return small() + 8 * max_small; }
  constexpr int64_t merges() const { return rows() + 4 * max_rows; }
  constexpr int64_t slots() const {
    return merges() + 4 * max_merges;
  }  // page · 16 + place of each token; -1: not stored
  constexpr int64_t pages() const { return slots() + max_tokens; }  // the last, so that its length may vary
};

}  // namespace bough
