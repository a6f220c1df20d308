#include "kernels/rms_norm/rms_norm_isa.h"

#include "kernels/common/element.h"

namespace bough::BOUGH_ISA {

template <class T, class A>
void rms_norm_rows(T* y, A* rstd, const T* x, const T* weight, int64_t num_rows, int64_t width, double eps) {
  for (int64_t r = 0; r < num_rows; ++r, x += width, y += width) {
    A sum = 0;
    for (int64_t d = 0; d < width; ++d) sum += load(x + d) * load(x + d);
    const A scale =
        A(1) / (sizeof(A) == 8 ? __builtin_sqrt(sum / width + eps)
                               : __builtin_sqrtf(static_cast<float>(sum / width + static_cast<A>(eps))));
    rstd[r] = scale;
    for (int64_t d = 0; d < width; ++d) store(y + d, load(x + d) * scale * load(weight + d));
  }
}

// Forward was y = x · rstd · w; now, with g = d_y · w: d_x = rstd · (g - x · rstd² · mean(g · x)).
template <bool kResidual, bool kAgain, class T, class A>
static inline void backward_row(T* d_x, T* y, A* d_weight, const T* d_y, const T* x, const T* weight,
                                const T* residual, A scale, int64_t width) {
  A dot = 0;
  for (int64_t d = 0; d < width; ++d) dot += load(d_y + d) * load(weight + d) * load(x + d);
  const A mean = dot * scale * scale / width;
#pragma GCC ivdep
  for (int64_t d = 0; d < width; ++d) {
    const A x_d = load(x + d), d_y_d = load(d_y + d), w_d = load(weight + d);
    d_weight[d] += d_y_d * x_d * scale;
    A d_x_d = scale * (d_y_d * w_d - x_d * mean);
    if constexpr (kResidual) d_x_d += load(residual + d);
    store(d_x + d, d_x_d);
    if constexpr (kAgain) store(y + d, x_d * scale * w_d);
  }
}

template <class T, class A>
void rms_norm_backward_rows(T* d_x, T* y, A* d_weight, const T* d_y, const T* x, const T* weight,
                            const T* residual, const A* rstd, int64_t num_rows, int64_t width) {
  const auto row = residual ? (y ? backward_row<true, true, T, A> : backward_row<true, false, T, A>)
                            : (y ? backward_row<false, true, T, A> : backward_row<false, false, T, A>);
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t at = r * width;
    row(d_x + at, y ? y + at : nullptr, d_weight, d_y + at, x + at, weight,
        residual ? residual + at : nullptr, rstd[r], width);
  }
}

#define INSTANTIATE(T, A)                                                                                  \
  template void rms_norm_rows<T, A>(T*, A*, const T*, const T*, int64_t, int64_t, double);                 \
  template void rms_norm_backward_rows<T, A>(T*, T*, A*, const T*, const T*, const T*, const T*, const A*, \
                                             int64_t, int64_t);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)

}  // namespace bough::BOUGH_ISA
