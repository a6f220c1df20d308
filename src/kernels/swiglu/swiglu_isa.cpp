#include "kernels/swiglu/swiglu_isa.h"

#include "kernels/common/element.h"
#include "kernels/common/exp.h"

namespace bough::BOUGH_ISA {

namespace {
template <class T>
Acc<T> sigmoid(Acc<T> x) {
  if constexpr (sizeof(T) == 2) return rough_sigmoid(x);
  else return 1 / (1 + vector_exp(-x));
}
}  // namespace

template <class T>
void swiglu_rows(T* y, const T* gate_up, int64_t num_rows, int64_t width) {
  for (int64_t r = 0; r < num_rows; ++r, y += width, gate_up += 2 * width) {
    const T* up = gate_up + width;
#pragma GCC ivdep
    for (int64_t f = 0; f < width; ++f) {
      const Acc<T> g = load(gate_up + f);
      store(y + f, g * sigmoid<T>(g) * load(up + f));
    }
  }
}

// Forward was y = g · s · u with s = sigmoid(g); now d_g = d_y · u · s · (1 + g · (1 - s)), d_u = d_y · g · s.
template <class T>
void swiglu_backward_rows(T* d_gate_up, T* y, const T* d_y, const T* gate_up, int64_t num_rows,
                          int64_t width) {
  for (int64_t r = 0; r < num_rows;
       ++r, y += width, d_y += width, gate_up += 2 * width, d_gate_up += 2 * width) {
    const T* up = gate_up + width;
    T* d_up = d_gate_up + width;
#pragma GCC ivdep
    for (int64_t f = 0; f < width; ++f) {
      const Acc<T> g = load(gate_up + f);
      const Acc<T> d = load(d_y + f);
      const Acc<T> u = load(up + f);
      const Acc<T> s = sigmoid<T>(g);
      store(d_gate_up + f, d * u * s * (1 + g * (1 - s)));
      store(d_up + f, d * g * s);
      store(y + f, g * s * u);
    }
  }
}

#define INSTANTIATE(T)                                          \
  template void swiglu_rows<T>(T*, const T*, int64_t, int64_t); \
  template void swiglu_backward_rows<T>(T*, T*, const T*, const T*, int64_t, int64_t);
INSTANTIATE(float)
INSTANTIATE(BFloat16Bits)
INSTANTIATE(double)

}  // namespace bough::BOUGH_ISA
