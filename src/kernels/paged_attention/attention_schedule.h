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

// Rows, and the runs that they take together: what a thread does at once. Not a concept of callers.
struct AttentionTask {
  int32_t row_begin = 0, row_end = 0;
  int32_t run_begin = 0, run_end = 0;  // their rows count from row_begin
  bool decodes = false;                // a row a sequence, else a part of one sequence
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
