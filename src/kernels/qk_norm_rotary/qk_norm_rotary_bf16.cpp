#include "kernels/common/bf16_lanes.h"
#include "kernels/qk_norm_rotary/qk_norm_rotary_isa.h"

namespace bough::bf16 {

namespace {
inline float inverse_rms(const Lanes& squares, int64_t width, double eps) {
  return 1 / __builtin_sqrtf(sum_of(squares) / static_cast<float>(width) + static_cast<float>(eps));
}

// kBlocks of 32 are half a head.
template <int kBlocks>
void norm_rotate(BFloat16Bits* y, const BFloat16Bits* qkv, const float* cos, const float* sin,
                 const BFloat16Bits* weight, double eps, const HeadRows& rows) {
  constexpr int64_t kHalf = kBlocks * kNeighbours, kWidth = 2 * kHalf;
  Lanes w[2 * kBlocks];
  for (int b = 0; weight && b < 2 * kBlocks; ++b) w[b] = load_lanes(weight + b * kNeighbours);
  for (int64_t t = 0; t < rows.num_rows; ++t, qkv += rows.qkv_stride, cos += kHalf, sin += kHalf) {
    Lanes c[kBlocks], s[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      c[b] = load_lanes(cos + b * kNeighbours);
      s[b] = load_lanes(sin + b * kNeighbours);
    }
    const BFloat16Bits* x = qkv;
    for (int64_t h = 0; h < rows.num_heads; ++h, x += kWidth, y += kWidth) {
      Lanes x_b[2 * kBlocks];
#pragma GCC unroll 8
      for (int b = 0; b < 2 * kBlocks; ++b) x_b[b] = load_lanes(x + b * kNeighbours);
      if (weight) {
        Lanes squares = zero_lanes();
#pragma GCC unroll 8
        for (int b = 0; b < 2 * kBlocks; ++b) squares = multiply_add(x_b[b], x_b[b], squares);
        const __m512 scale = _mm512_set1_ps(inverse_rms(squares, kWidth, eps));
#pragma GCC unroll 8
        for (int b = 0; b < 2 * kBlocks; ++b) x_b[b] = x_b[b] * scale * w[b];
      }
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        const Lanes first = x_b[b], second = x_b[kBlocks + b];
        store_lanes(y + b * kNeighbours, multiply_subtract(first, c[b], second * s[b]));
        store_lanes(y + kHalf + b * kNeighbours, multiply_add(second, c[b], first * s[b]));
      }
    }
  }
}

// The equations: qk_norm_rotary_isa.cpp.
template <int kBlocks>
void norm_rotate_backward(BFloat16Bits* d_qkv, float* d_weight, const BFloat16Bits* d_y,
                          const BFloat16Bits* qkv, const float* cos, const float* sin,
                          const BFloat16Bits* weight, double eps, const HeadRows& rows) {
  constexpr int64_t kHalf = kBlocks * kNeighbours, kWidth = 2 * kHalf;
  Lanes w[2 * kBlocks], sums[2 * kBlocks];
  for (int b = 0; weight && b < 2 * kBlocks; ++b) {
    w[b] = load_lanes(weight + b * kNeighbours);
    sums[b] = load_lanes(d_weight + b * kNeighbours);
  }
  for (int64_t t = 0; t < rows.num_rows;
       ++t, qkv += rows.qkv_stride, d_qkv += rows.qkv_stride, cos += kHalf, sin += kHalf) {
    Lanes c[kBlocks], s[kBlocks];
    for (int b = 0; b < kBlocks; ++b) {
      c[b] = load_lanes(cos + b * kNeighbours);
      s[b] = load_lanes(sin + b * kNeighbours);
    }
    const BFloat16Bits* x = qkv;
    BFloat16Bits* d_x = d_qkv;
    for (int64_t h = 0; h < rows.num_heads; ++h, x += kWidth, d_x += kWidth, d_y += kWidth) {
      Lanes g[2 * kBlocks];
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        const Lanes first = load_lanes(d_y + b * kNeighbours);
        const Lanes second = load_lanes(d_y + kHalf + b * kNeighbours);
        g[b] = multiply_add(first, c[b], second * s[b]);
        g[kBlocks + b] = multiply_subtract(second, c[b], first * s[b]);
      }
      if (!weight) {
#pragma GCC unroll 8
        for (int b = 0; b < 2 * kBlocks; ++b) store_lanes(d_x + b * kNeighbours, g[b]);
        continue;
      }
      Lanes x_b[2 * kBlocks], squares = zero_lanes(), dot = zero_lanes();
#pragma GCC unroll 8
      for (int b = 0; b < 2 * kBlocks; ++b) {
        x_b[b] = load_lanes(x + b * kNeighbours);
        squares = multiply_add(x_b[b], x_b[b], squares);
        dot = multiply_add(g[b] * w[b], x_b[b], dot);
      }
      const float scale = inverse_rms(squares, kWidth, eps);
      const __m512 factor = _mm512_set1_ps(scale);
      const __m512 mean = _mm512_set1_ps(sum_of(dot) * scale * scale / static_cast<float>(kWidth));
#pragma GCC unroll 8
      for (int b = 0; b < 2 * kBlocks; ++b) {
        sums[b] = multiply_add(g[b], x_b[b] * factor, sums[b]);
        store_lanes(d_x + b * kNeighbours, subtract_product(g[b] * w[b], x_b[b], mean) * factor);
      }
    }
  }
  for (int b = 0; weight && b < 2 * kBlocks; ++b) store_lanes(d_weight + b * kNeighbours, sums[b]);
}
}  // namespace

void norm_rotate_rows(BFloat16Bits* y, const BFloat16Bits* qkv, const float* cos, const float* sin,
                      const BFloat16Bits* weight, double eps, const HeadRows& rows) {
  (rows.head_dim == 64 ? norm_rotate<1> : norm_rotate<2>)(y, qkv, cos, sin, weight, eps, rows);
}

void norm_rotate_backward_rows(BFloat16Bits* d_qkv, float* d_weight, float*, const BFloat16Bits* d_y,
                               const BFloat16Bits* qkv, const float* cos, const float* sin,
                               const BFloat16Bits* weight, double eps, const HeadRows& rows) {
  (rows.head_dim == 64 ? norm_rotate_backward<1> : norm_rotate_backward<2>)(d_qkv, d_weight, d_y, qkv, cos,
                                                                            sin, weight, eps, rows);
}

}  // namespace bough::bf16
