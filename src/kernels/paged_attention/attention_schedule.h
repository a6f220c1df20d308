// Which rows of a pass visit which pages together, so that pages that several sequences hold are read once for all of
// them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/paged_attention/pages.h"

namespace bough {

// Tokens at positions begin ... begin + count - 1 of one sequence, whose pages are `pages` (room for all of
// them). Keys and values of the positions before `begin` are stored already.
struct Segment {
  std::span<const int32_t> pages;
  int64_t begin = 0;
  int64_t count = 0;
};

// What a thread does at once: rows (query tokens) and the pages they visit, in order. Not a concept of
// callers.
struct AttentionRow {
  int64_t token = 0;  // of the pass
  int64_t limit = 0;  // sees positions below it; at least one of every page it visits
  std::span<const int32_t> pages;
};
struct AttentionRun {  // rows [row_begin, row_end) visit pages[page_begin, page_end)
  int32_t row_begin = 0, row_end = 0;
  int32_t page_begin = 0, page_end = 0;
  std::span<const int32_t> pages;
};
struct AttentionTask {
  int32_t row_begin = 0, row_end = 0;
  int32_t run_begin = 0, run_end = 0;  // their rows count from row_begin
};
struct AttentionSchedule {
  std::vector<AttentionRow> rows;
  std::vector<AttentionRun> runs;
  std::vector<AttentionTask> tasks;
};
// The pass's tokens are those of the segments, in order. At most `max_rows` decode rows a task: a task's rows share
// reads, but only tasks run in parallel.
AttentionSchedule schedule_attention(std::span<const Segment> segments, int64_t max_rows);
// With as many decode rows a task as let this many threads and key/value heads even out.
AttentionSchedule schedule_attention_for_threads(std::span<const Segment> segments, int64_t num_kv_heads);

}  // namespace bough
