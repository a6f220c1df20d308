#include "kernels/qk_norm_rotary/qk_norm_rotary_isa.h"

#include "kernels/common/element.h"

namespace bough::BOUGH_ISA {

template <class A, class T>
static inline A inverse_rms(const T* x, int64_t width, double eps) {
  A sum = 0;
  for (int64_t d = 0; d < width; ++d) sum += load(x + d) * load(x + d);
  return A(1) / (sizeof(A) == 8 ? __builtin_sqrt(sum / width + eps)
                                : __builtin_sqrtf(static_cast<float>(sum / width + static_cast<A>(eps))));
}

template <class T, class A>
void norm_rotate_rows(T* y, const T* qkv, const A* cos, const A* sin, const T* weight, double eps,
                      const HeadRows& rows) {
  const int64_t half = rows.head_dim / 2;
  const T* x = qkv;
  for (int64_t h = 0; h < rows.num_heads; ++h, x += rows.head_dim, y += rows.head_dim) {
    if (weight) {
      const A scale = inverse_rms<A>(x, rows.head_dim, eps);
#pragma GCC ivdep
      for (int64_t d = 0; d < half; ++d) {
        const A first = load(x + d) * scale * load(weight + d);
        const A second = load(x + half + d) * scale * load(weight + half + d);
        store(y + d, first * cos[d] - second * sin[d]);
        store(y + half + d, second * cos[d] + first * sin[d]);
      }
    } else {
#pragma GCC ivdep
      for (int64_t d = 0; d < half; ++d) {
        const A first = load(x + d);
        const A second = load(x + half + d);
        store(y + d, first * cos[d] - second * sin[d]);
        store(y + half + d, second * cos[d] + first * sin[d]);
      }
    }
  }
}

// Forward was y = rotate(x · rstd · w); now the rotation is turned around into `g` = d(x · rstd · w), and then
// d_x = rstd · (g·w - x · rstd² · mean(g·w·x)), d_w += g · x · rstd.
template <class T, class A>
void norm_rotate_backward_rows(T* d_qkv, A* d_weight, A* g, const T* d_y, const T* qkv, const A* cos,
                               const A* sin, const T* weight, double eps, const HeadRows& rows) {
  const int64_t width = rows.head_dim;
  const int64_t half = width / 2;
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
    if (weight) {
      const A scale = inverse_rms<A>(x, width, eps);
      A dot = 0;
      for (int64_t d = 0; d < width; ++d) dot += g[d] * load(weight + d) * load(x + d);
      const A mean = dot * scale * scale / width;
#pragma GCC ivdep
      for (int64_t d = 0; d < width; ++d) {
        const A x_d = load(x + d);
        d_weight[d] += g[d] * x_d * scale;
        store(d_x + d, scale * (g[d] * load(weight + d) - x_d * mean));
      }
    } else {
#pragma GCC ivdep
      for (int64_t d = 0; d < width; ++d) store(d_x + d, g[d]);
    }
  }
}

#define INSTANTIATE(T, A)                                                                                    \
  template void norm_rotate_rows<T, A>(T*, const T*, const A*, const A*, const T*, double, const HeadRows&); \
  template void norm_rotate_backward_rows<T, A>(T*, A*, A*, const T*, const T*, const A*, const A*,          \
                                                const T*, double, const HeadRows&);
INSTANTIATE(float, float)
INSTANTIATE(BFloat16Bits, float)
INSTANTIATE(double, double)

}  // namespace bough::BOUGH_ISA
