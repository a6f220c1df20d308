// Prefetching for kernels that use intrinsics. Internal linkage, because the files that include this header
// are compiled with different options.
#pragma once

#include "kernels/matrix_product/matrix_product_tiles.h"

namespace bough {
namespace {

// Prefetches a few cache lines per step of a product. All lines at once would delay the product's loads.
class UpcomingLines {
 public:
  UpcomingLines(const Upcoming& upcoming, int64_t rows, int64_t steps)
      : row_(static_cast<const char*>(upcoming.rows)),
        end_(row_ + rows * upcoming.stride),
        stride_(upcoming.stride),
        lines_(upcoming.lines),
        per_step_((rows * upcoming.lines + steps - 1) / steps) {}

  // Prefetches the next lines into the L1 cache, for writing.
  void write_soon() {
    each([](const char* line) { __builtin_prefetch(line, 1); });
  }
  // Prefetches the next lines into the L2 cache, for reading.
  void read_soon() {
    each([](const char* line) { __builtin_prefetch(line, 0, 2); });
  }

 private:
  template <class Visit>
  void each(Visit&& visit) {
    for (int64_t i = 0; i < per_step_ && row_ < end_; ++i) {
      visit(row_ + column_ * 64);
      if (++column_ == lines_) {
        column_ = 0;
        row_ += stride_;
      }
    }
  }

  const char* row_;
  const char* end_;
  int64_t stride_, lines_, per_step_, column_ = 0;
};

}  // namespace
}  // namespace bough
