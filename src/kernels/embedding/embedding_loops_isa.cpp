#include "kernels/common/element.h"
#include "kernels/embedding/embedding_loops.h"

namespace bough::BOUGH_ISA {

template <class T, class A>
void add_rows_of_tokens(A* sums, const int64_t* tokens, const T* rows, int64_t num_rows, int64_t width,
                        int64_t begin, int64_t end) {
  constexpr int64_t kAhead = 4;  // rows to prefetch ahead, because sums lie anywhere in memory
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(A));
  for (int64_t t = 0; t < num_rows; ++t) {
    if (t + kAhead < num_rows) {
      const A* later = sums + tokens[t + kAhead] * width;
      for (int64_t d = begin; d < end; d += kLine) __builtin_prefetch(later + d, 1);
    }
    A* sum = sums + tokens[t] * width;
    const T* row = rows + t * width;
#pragma GCC ivdep
    for (int64_t d = begin; d < end; ++d) sum[d] += load(row + d);
  }
}

#define INSTANTIATE(T, A) \
  template void add_rows_of_tokens<T, A>(A*, const int64_t*, const T*, int64_t, int64_t, int64_t, int64_t);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)

}  // namespace bough::BOUGH_ISA
