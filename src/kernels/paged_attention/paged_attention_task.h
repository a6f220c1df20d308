// What one thread does at once in paged attention: rows (query tokens) and the pages they visit, in order. Plain
// types: the files that work on them include neither torch nor the standard library's templates (common/isa.h).
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

inline constexpr int64_t kPageTokens = 16;  // one AVX-512 register of fp32 scores

struct AttentionRow {
  int64_t token = 0;               // of the pass
  int64_t limit = 0;               // sees positions below it; at least one of every page it visits
  const int32_t* pages = nullptr;  // [num_pages], its whole table up to the limit
  int64_t num_pages = 0;
};
struct AttentionRun {  // rows [row_begin, row_end) visit pages[page_begin, page_end)
  int32_t row_begin = 0, row_end = 0;
  int32_t page_begin = 0, page_end = 0;
  const int32_t* pages = nullptr;
};

// One layer. Pages as in pages.h.
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
  // Of the keys of a page's head, and of its values.
  int64_t offset(int64_t page, int64_t g) const { return (page * G + g) * 2 * kPageTokens * padded_H; }
};

// The rows of one task times the heads of one key/value head g are its entries, heads of a row beside each other.
// Room for what is kept of each:
template <class Acc>
struct TaskView {
  const AttentionRow* rows;
  const AttentionRun* runs;  // their rows count from rows[0]; of one row in ascending order of pages
  int64_t num_rows, num_runs, g;
  Acc* q;        // [entries, padded H]
  Acc* output;   // [entries, padded H], unnormalised
  Acc* sum;      // [entries, 16]: the sum is that of the lanes
  Acc* maximum;  // [entries]
};

namespace bf16 {
// Runs a task by tiles: products of bf16, summed in fp32. begin_tiles() is not needed, end_tiles() afterwards is
// (matrix_product_tiles.h).
void run_attention_task(const LayerView<BFloat16Bits, float>& layer, const TaskView<float>& task);
}  // namespace bf16

}  // namespace bough
