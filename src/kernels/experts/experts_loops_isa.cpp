#include "kernels/common/element.h"
#include "kernels/experts/experts_loops.h"

namespace bough::BOUGH_ISA {

template <class T, class A>
void add_weighted_rows(T* y, const T* rows, const int64_t* places, const A* weights, const T* residual,
                       int64_t num_tokens, int64_t num_chosen, int64_t width, A* sums) {
  for (int64_t t = 0; t < num_tokens; ++t, y += width) {
    for (int64_t d = 0; d < width; ++d) sums[d] = residual ? load(residual + t * width + d) : A(0);
    for (int64_t k = 0; k < num_chosen; ++k) {
      const T* row = rows + places[t * num_chosen + k] * width;
      const A weight = weights ? weights[t * num_chosen + k] : A(1);
#pragma GCC ivdep
      for (int64_t d = 0; d < width; ++d) sums[d] += weight * load(row + d);
    }
#pragma GCC ivdep
    for (int64_t d = 0; d < width; ++d) store(y + d, sums[d]);
  }
}

template <class T, class A>
void weigh_rows(A* d_weights, T* a, T* d_gate_up, const T* d_a, const A* weights, int64_t num_rows,
                int64_t width) {
  for (int64_t p = 0; p < num_rows; ++p, a += width, d_a += width, d_gate_up += 2 * width) {
    const A weight = weights[p];
    A dot = 0;
    for (int64_t f = 0; f < width; ++f) dot += load(d_a + f) * load(a + f);
    d_weights[p] = dot;
#pragma GCC ivdep
    for (int64_t f = 0; f < width; ++f) store(a + f, weight * load(a + f));
#pragma GCC ivdep
    for (int64_t f = 0; f < 2 * width; ++f) store(d_gate_up + f, weight * load(d_gate_up + f));
  }
}

#define INSTANTIATE(T, A)                                                                                   \
  template void add_weighted_rows<T, A>(T*, const T*, const int64_t*, const A*, const T*, int64_t, int64_t, \
                                        int64_t, A*);                                                       \
  template void weigh_rows<T, A>(A*, T*, T*, const T*, const A*, int64_t, int64_t);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)

}  // namespace bough::BOUGH_ISA
