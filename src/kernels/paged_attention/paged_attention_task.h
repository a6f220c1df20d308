// What one thread does at once in paged attention: rows (query tokens) and the pages they visit, in order.
// Plain types: the files that work on them include neither torch nor the standard library's templates
// (common/isa.h).
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

inline constexpr int64_t kPageTokens = 16;  // one AVX-512 register of fp32 scores

// Records of int32, as they lie in the op's work (paged_plan.h). A row's list of pages begins at pages_at of
// the work's pages; keys count by their place in the list.
struct AttentionRow {
  int32_t token = 0;                    // of the pass
  int32_t limit = 0;                    // sees the keys below it; at least one of every page it visits
  int32_t pages_at = 0, num_pages = 0;  // up to the limit
};
struct AttentionRun {  // rows [row_begin, row_end) visit pages [page_begin, page_end) of their lists, which
                       // agree
  int32_t row_begin = 0, row_end = 0;
  int32_t page_begin = 0, page_end = 0;
  int32_t pages_at = 0;  // of one of the rows
};
struct AttentionTask {
  int32_t row_begin = 0, row_end = 0;
  int32_t run_begin = 0, run_end = 0;  // their rows count from row_begin
  int32_t decodes = 0;                 // a row a sequence, else a part of one sequence
  int32_t head = -1;                   // the key/value head that it is of; -1: all
};

// What attention reads and writes of one layer. Pages lie as in pages.h.
template <class T, class Acc>
struct LayerView {
  const T* q;  // token t, head n at q + t * q_stride_t + n * q_stride_n
  int64_t q_stride_t, q_stride_n;
  T* o;           // [T, N, H]
  Acc* lse;       // [T, N], or null
  const T* keys;  // of page 0, head 0
  const T* values;
  double scale;
  int64_t N, G, H, padded_H;
  int64_t heads() const { return N / G; }
  // Where the keys of a page's head begin, and its values, in their arrays.
  int64_t offset(int64_t page, int64_t g) const { return (page * G + g) * 2 * kPageTokens * padded_H; }
};

// The rows of one task times the heads of one key/value head g are its entries, heads of a row beside each
// other. Room for what is kept of each:
template <class Acc>
struct TaskView {
  const AttentionRow* rows;
  const AttentionRun* runs;  // their rows count from rows[0]; of one row in ascending order of pages
  const int32_t* pages;      // the lists of all rows
  int64_t num_rows, num_runs, g;
  Acc* q;        // [entries, padded H]
  Acc* output;   // [entries, padded H], unnormalised
  Acc* sum;      // [entries, 16]: the sum is that of the lanes
  Acc* maximum;  // [entries]

  int32_t page(const AttentionRun& run, int64_t i) const { return pages[run.pages_at + i]; }
};

namespace bf16 {
// Runs a task by tiles: products of bf16, summed in fp32. begin_tiles() is not needed, end_tiles() afterwards
// is (matrix_product_tiles.h).
void run_attention_task(const LayerView<BFloat16Bits, float>& layer, const TaskView<float>& task);
}  // namespace bf16

}  // namespace bough
