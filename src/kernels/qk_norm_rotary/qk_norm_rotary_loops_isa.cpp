#include "kernels/common/element.h"
#include "kernels/qk_norm_rotary/qk_norm_rotary_loops.h"

namespace bough::BOUGH_ISA {

template <class A, class T>
static inline A inverse_rms(const T* x, int64_t width, double eps) {
  A sum = 0;
  for (int64_t d = 0; d < width; ++d) sum += load(x + d) * load(x + d);
  return A(1) / (sizeof(A) == 8 ? __builtin_sqrt(sum / width + eps)
                                : __builtin_sqrtf(static_cast<float>(sum / width + static_cast<A>(eps))));
}

template <bool kOffset, class T, class A>
static inline void rotate_rows(T* y, const T* qkv, const A* cos, const A* sin, const T* weight,
                               const NormSettings& norm, const HeadRows& rows) {
  const int64_t half = rows.num_pairs;
  const A offset = static_cast<A>(norm.weight_offset);
  const T* x = qkv;
  for (int64_t h = 0; h < rows.num_heads; ++h, x += rows.head_dim, y += rows.head_dim) {
    if (weight) {
      const A scale = inverse_rms<A>(x, rows.head_dim, norm.eps);
#pragma GCC ivdep
      for (int64_t d = 0; d < half; ++d) {
        const A first = load(x + d) * scale * factor_of<kOffset, A>(weight + d, offset);
        const A second = load(x + half + d) * scale * factor_of<kOffset, A>(weight + half + d, offset);
        store(y + d, first * cos[d] - second * sin[d]);
        store(y + half + d, second * cos[d] + first * sin[d]);
      }
      for (int64_t d = 2 * half; d < rows.head_dim; ++d)
        store(y + d, load(x + d) * scale * factor_of<kOffset, A>(weight + d, offset));
    } else {
#pragma GCC ivdep
      for (int64_t d = 0; d < half; ++d) {
        const A first = load(x + d);
        const A second = load(x + half + d);
        store(y + d, first * cos[d] - second * sin[d]);
        store(y + half + d, second * cos[d] + first * sin[d]);
      }
      for (int64_t d = 2 * half; d < rows.head_dim; ++d) y[d] = x[d];
    }
  }
}

// Forward: y = rotate(x · rstd · w). Backward first inverts the rotation into `g` = d(x · rstd · w). Then
// d_x = rstd · (g·w - x · rstd² · mean(g·w·x)), d_w += g · x · rstd.
template <bool kOffset, class T, class A>
static inline void rotate_backward_rows(T* d_qkv, A* d_weight, A* g, const T* d_y, const T* qkv, const A* cos,
                                        const A* sin, const T* weight, const NormSettings& norm,
                                        const HeadRows& rows) {
  const int64_t width = rows.head_dim;
  const int64_t half = rows.num_pairs;
  const A offset = static_cast<A>(norm.weight_offset);
  for (int64_t h = 0; h < rows.num_heads; ++h, d_y += width) {
    const T* x = qkv + h * width;
    T* d_x = d_qkv + h * width;
#pragma GCC ivdep
    for (int64_t d = 0; d < half; ++d) {
      const A first = load(d_y + d);
      const A second = load(d_y + half + d);
      g[d] = first * cos[d] + second * sin[d];
      g[half + d] = second * cos[d] - first * sin[d];
    }
    for (int64_t d = 2 * half; d < width; ++d) g[d] = load(d_y + d);
    if (weight) {
      const A scale = inverse_rms<A>(x, width, norm.eps);
      A dot = 0;
      for (int64_t d = 0; d < width; ++d)
        dot += g[d] * factor_of<kOffset, A>(weight + d, offset) * load(x + d);
      const A mean = dot * scale * scale / width;
#pragma GCC ivdep
      for (int64_t d = 0; d < width; ++d) {
        const A x_d = load(x + d);
        d_weight[d] += g[d] * x_d * scale;
        store(d_x + d, scale * (g[d] * factor_of<kOffset, A>(weight + d, offset) - x_d * mean));
      }
    } else {
#pragma GCC ivdep
      for (int64_t d = 0; d < width; ++d) store(d_x + d, g[d]);
    }
  }
}

template <class T, class A>
void norm_rotate_rows(T* y, const T* qkv, const A* cos, const A* sin, const T* weight,
                      const NormSettings& norm, const HeadRows& rows) {
  const auto all = norm.weight_offset == 0 ? rotate_rows<false, T, A> : rotate_rows<true, T, A>;
  all(y, qkv, cos, sin, weight, norm, rows);
}

template <class T, class A>
void norm_rotate_backward_rows(T* d_qkv, A* d_weight, A* g, const T* d_y, const T* qkv, const A* cos,
                               const A* sin, const T* weight, const NormSettings& norm,
                               const HeadRows& rows) {
  const auto all =
      norm.weight_offset == 0 ? rotate_backward_rows<false, T, A> : rotate_backward_rows<true, T, A>;
  all(d_qkv, d_weight, g, d_y, qkv, cos, sin, weight, norm, rows);
}

#define INSTANTIATE(T, A)                                                                               \
  template void norm_rotate_rows<T, A>(T*, const T*, const A*, const A*, const T*, const NormSettings&, \
                                       const HeadRows&);                                                \
  template void norm_rotate_backward_rows<T, A>(T*, A*, A*, const T*, const T*, const A*, const A*,     \
                                                const T*, const NormSettings&, const HeadRows&);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)

}  // namespace bough::BOUGH_ISA
