// The work of one thread in paged attention: rows (a row is one query token) and the pages that they visit,
// in order. Plain types: the files that use them include neither torch nor the standard library's templates
// (common/isa.h).
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

inline constexpr int64_t kPageTokens = 16;    // one AVX-512 register of fp32 scores
inline constexpr uint16_t kAllKeys = 0xFFFF;  // mask of a page's keys: bit j is set if key j is visible

// Records of int32 in the `work` tensor of the op (paged_plan.h). A row's page list begins at index pages_at
// of PagedSchedule::pages. The row's keys are numbered by their place in this list: page i has keys 16 i to
// 16 i + 15. If the schedule has masks, the row sees only the keys of its own mask of each page.
struct AttentionRow {
  int32_t token = 0;                    // number in the pass
  int32_t limit = 0;                    // the row sees keys below it, at least one of each page
  int32_t pages_at = 0, num_pages = 0;  // num_pages: pages with keys below the limit
};
struct AttentionRun {  // rows [row_begin, row_end) visit pages [page_begin, page_end) of their lists, which
                       // are equal there
  int32_t row_begin = 0, row_end = 0;
  int32_t page_begin = 0, page_end = 0;
  int32_t pages_at = 0;  // where the page list of one of the rows begins
};
struct AttentionTask {
  int32_t row_begin = 0, row_end = 0;
  int32_t run_begin = 0, run_end = 0;  // rows of its runs are counted from row_begin
  int32_t decodes = 0;                 // 1: each row is of another sequence; 0: all rows are of one sequence
  int32_t head = -1;                   // key/value head; -1: all
};

// The inputs and outputs of attention in one layer. Page layout: pages.h.
template <class T, class Acc>
struct LayerView {
  const T* q;  // token t, head n at q + t * q_stride_t + n * q_stride_n
  int64_t q_stride_t, q_stride_n;
  T* o;           // [T, N, H]
  Acc* lse;       // [T, N], or nullptr
  const T* keys;  // of page 0, head 0
  const T* values;
  double scale;
  int64_t N, G, H, padded_H;
  int64_t heads() const { return N / G; }
  // Offset of one head's keys in a page, counted from `keys`, and of its values, counted from `values`.
  int64_t offset(int64_t page, int64_t g) const { return (page * G + g) * 2 * kPageTokens * padded_H; }
};

// One task for one key/value head g. Its entries are all pairs of a row of the task and a query head of g.
// The entries of a row are adjacent. The arrays of [entries] are scratch of the thread.
template <class Acc>
struct TaskView {
  const AttentionRow* rows;
  const AttentionRun* runs;  // rows are counted from rows[0]; the runs of a row are in the order of its pages
  const int32_t* pages;      // page lists of all rows
  const int32_t* masks;      // masks of the pages in these lists; nullptr: all keys are visible
  int64_t num_rows, num_runs, g;
  Acc* q;        // [entries, padded H]
  Acc* output;   // [entries, padded H], unnormalised
  Acc* sum;      // [entries, 16]: the total is the sum of the 16 lanes
  Acc* maximum;  // [entries]

  int32_t page(const AttentionRun& run, int64_t i) const { return pages[run.pages_at + i]; }
  // The keys of the row's page i that the row sees; at least one.
  uint16_t visible(const AttentionRow& row, int64_t i) const {
    const int64_t count = row.limit - i * kPageTokens;
    const int32_t begun = count < kPageTokens ? (1 << count) - 1 : int32_t{kAllKeys};
    return static_cast<uint16_t>(masks ? begun & masks[row.pages_at + i] : begun);
  }
};

// Iterates over the pages of a task in order, some pages ahead of the computation, to prefetch them, because
// they are scattered over memory far larger than the caches. Always inlined: the linker must not keep the
// AVX-512 copy of a function for CPUs without it.
template <class T, class Acc>
class UpcomingPages {
 public:
  struct Page {
    int64_t offset;    // of its keys and values (LayerView)
    uint16_t visible;  // keys that the run's only row sees; all keys if the run has several rows
  };
  // num_ahead: pages between the first page of the computation and the first one that next() returns.
  [[gnu::always_inline]] UpcomingPages(const LayerView<T, Acc>& layer, const TaskView<Acc>& task,
                                       int64_t num_ahead)
      : layer_(layer), task_(task) {
    if (task.num_runs > 0) number_ = task.runs[0].page_begin;
    for (int64_t i = 0; i < num_ahead; ++i) next();
  }
  // Returns the next page. At the end of the task, repeats the last page.
  [[gnu::always_inline]] Page next() {
    if (run_ == task_.num_runs) return page_;
    const AttentionRun& run = task_.runs[run_];
    const bool has_one_row = run.row_end - run.row_begin == 1;
    page_ = {layer_.offset(task_.page(run, number_), task_.g),
             has_one_row ? task_.visible(task_.rows[run.row_begin], number_) : kAllKeys};
    if (++number_ == run.page_end && ++run_ < task_.num_runs) number_ = task_.runs[run_].page_begin;
    return page_;
  }

 private:
  const LayerView<T, Acc>& layer_;
  const TaskView<Acc>& task_;
  int64_t run_ = 0, number_ = 0;
  Page page_ = {0, 0};
};

namespace bf16 {
// Computes a task in bf16, with sums in fp32. Configures the AMX tiles, but does not release them: the caller
// must call end_tiles() (matrix_product_tiles.h) after its last task.
void run_attention_task(const LayerView<BFloat16Bits, float>& layer, const TaskView<float>& task);
}  // namespace bf16

}  // namespace bough
