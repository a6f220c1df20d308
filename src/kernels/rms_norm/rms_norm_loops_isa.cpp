#include "kernels/common/element.h"
#include "kernels/rms_norm/rms_norm_loops.h"

namespace bough::BOUGH_ISA {

// Returns the normalised element. Forward and backward, which computes the element again, must agree to the
// last bit. With an offset, the compiler would otherwise group the factors differently in forward and in
// backward. The barriers prevent this.
template <bool kOffset, class A>
static inline A normed(A x, A scale, A factor) {
  if constexpr (kOffset) return __builtin_assoc_barrier(x * scale) * __builtin_assoc_barrier(factor);
  else return x * scale * factor;
}

template <bool kOffset, class T, class A>
static inline void norm_rows(T* y, A* rstd, const T* x, const T* weight, int64_t num_rows, int64_t width,
                             const NormSettings& norm) {
  const double eps = norm.eps;
  const A offset = static_cast<A>(norm.weight_offset);
  for (int64_t r = 0; r < num_rows; ++r, x += width, y += width) {
    A sum = 0;
    for (int64_t d = 0; d < width; ++d) sum += load(x + d) * load(x + d);
    const A scale =
        A(1) / (sizeof(A) == 8 ? __builtin_sqrt(sum / width + eps)
                               : __builtin_sqrtf(static_cast<float>(sum / width + static_cast<A>(eps))));
    rstd[r] = scale;
    for (int64_t d = 0; d < width; ++d)
      store(y + d, normed<kOffset, A>(load(x + d), scale, factor_of<kOffset, A>(weight + d, offset)));
  }
}

template <class T, class A>
void rms_norm_rows(T* y, A* rstd, const T* x, const T* weight, int64_t num_rows, int64_t width,
                   const NormSettings& norm) {
  const auto rows = norm.weight_offset == 0 ? norm_rows<false, T, A> : norm_rows<true, T, A>;
  rows(y, rstd, x, weight, num_rows, width, norm);
}

// Forward: y = x · rstd · w.
// Backward, with g = d_y · w: d_x = rstd · (g - x · rstd² · mean(g · x)).
template <bool kOffset, bool kResidual, bool kAgain, class T, class A>
static inline void backward_row(T* d_x, T* y, A* d_weight, const T* d_y, const T* x, const T* weight,
                                const T* residual, A scale, int64_t width, A offset) {
  A dot = 0;
  for (int64_t d = 0; d < width; ++d)
    dot += load(d_y + d) * factor_of<kOffset, A>(weight + d, offset) * load(x + d);
  const A mean = dot * scale * scale / width;
#pragma GCC ivdep
  for (int64_t d = 0; d < width; ++d) {
    const A x_d = load(x + d), d_y_d = load(d_y + d), w_d = factor_of<kOffset, A>(weight + d, offset);
    d_weight[d] += d_y_d * x_d * scale;
    A d_x_d = scale * (d_y_d * w_d - x_d * mean);
    if constexpr (kResidual) d_x_d += load(residual + d);
    store(d_x + d, d_x_d);
    if constexpr (kAgain) store(y + d, normed<kOffset>(x_d, scale, w_d));
  }
}

template <bool kOffset, class T, class A>
static inline auto backward_row_of(bool residual, bool again) {
  return residual
             ? (again ? backward_row<kOffset, true, true, T, A> : backward_row<kOffset, true, false, T, A>)
             : (again ? backward_row<kOffset, false, true, T, A> : backward_row<kOffset, false, false, T, A>);
}

template <class T, class A>
void rms_norm_backward_rows(T* d_x, T* y, A* d_weight, const T* d_y, const T* x, const T* weight,
                            const T* residual, const A* rstd, int64_t num_rows, int64_t width,
                            double weight_offset) {
  const auto row = weight_offset == 0 ? backward_row_of<false, T, A>(residual, y)
                                      : backward_row_of<true, T, A>(residual, y);
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t at = r * width;
    row(d_x + at, y ? y + at : nullptr, d_weight, d_y + at, x + at, weight,
        residual ? residual + at : nullptr, rstd[r], width, static_cast<A>(weight_offset));
  }
}

#define INSTANTIATE(T, A)                                                                                  \
  template void rms_norm_rows<T, A>(T*, A*, const T*, const T*, int64_t, int64_t, const NormSettings&);    \
  template void rms_norm_backward_rows<T, A>(T*, T*, A*, const T*, const T*, const T*, const T*, const A*, \
                                             int64_t, int64_t, double);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)

}  // namespace bough::BOUGH_ISA
