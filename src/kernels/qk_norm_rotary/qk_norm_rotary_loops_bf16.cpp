// AVX512-BF16, 32 neighbouring elements at a time. qk_norm_rotary_loops_isa.cpp has the equations.
//
// Forward first computes the inverse RMS of up to kMostHeads heads, kTogether of them in one vector. This
// first loop brings the heads' lines into the cache in order. Another order would halve the memory rate.
#include "kernels/common/bf16_lanes.h"
#include "kernels/qk_norm_rotary/qk_norm_rotary_loops.h"

namespace bough::bf16 {

namespace {
constexpr int64_t kTogether = 4;  // heads whose square roots are computed in one vector
constexpr int64_t kMostHeads = 8;

// Returns 1 / sqrt(mean of squares + eps) for each of kTogether heads.
inline __m128 inverse_rms(const __m512 (&squares)[kTogether], int64_t width, double eps) {
  const __m128 mean = _mm_div_ps(sums_across(squares), _mm_set1_ps(static_cast<float>(width)));
  return _mm_div_ps(_mm_set1_ps(1), _mm_sqrt_ps(_mm_add_ps(mean, _mm_set1_ps(static_cast<float>(eps)))));
}

inline __m512 broadcast_inverse_rms(__m512 squares, int64_t width, double eps) {
  const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(width);
  return _mm512_set1_ps(1 / __builtin_sqrtf(mean + static_cast<float>(eps)));
}

// Writes the inverse RMS of `count` heads next to each other.
template <int64_t kWidth>
inline void inverse_rms_of_heads(float* scales, const BFloat16Bits* x, int64_t count, double eps) {
  for (int64_t h = 0; h < count; h += kTogether) {
    __m512 squares[kTogether];
#pragma GCC unroll 4
    for (int64_t i = 0; i < kTogether; ++i) {
      squares[i] = _mm512_setzero_ps();
      for (int64_t d = 0; h + i < count && d < kWidth; d += kNeighbours)
        squares[i] = add_squares(x + (h + i) * kWidth + d, squares[i]);
    }
    _mm_store_ps(scales + h, inverse_rms(squares, kWidth, eps));
  }
}

// The cosines and sines of one token. kBlocks blocks of 32 elements are half a head.
template <int kBlocks>
struct Angles {
  Lanes cos[kBlocks], sin[kBlocks];
  Angles(const float* c, const float* s) {
    for (int b = 0; b < kBlocks; ++b) {
      cos[b] = load_lanes(c + b * kNeighbours);
      sin[b] = load_lanes(s + b * kNeighbours);
    }
  }
};

template <int kBlocks>
struct Weight {
  Lanes w[2 * kBlocks];
  Weight(const BFloat16Bits* weight, double offset) {
    const __m512 added = _mm512_set1_ps(static_cast<float>(offset));
    for (int b = 0; b < 2 * kBlocks; ++b)
      w[b] =
          weight ? load_lanes(weight + b * kNeighbours) + added : Lanes{_mm512_set1_ps(1), _mm512_set1_ps(1)};
  }
};

template <bool kNorm, int kBlocks>
void forward_heads(BFloat16Bits* y, const BFloat16Bits* qkv, const float* cos, const float* sin,
                   const BFloat16Bits* weight, const NormSettings& norm, const HeadRows& rows) {
  constexpr int64_t kHalf = kBlocks * kNeighbours, kWidth = 2 * kHalf;
  const Weight<kBlocks> w(weight, norm.weight_offset);
  alignas(64) float scales[kMostHeads];
  const Angles<kBlocks> angles(cos, sin);
  const BFloat16Bits* x = qkv;
  for (int64_t first = 0; first < rows.num_heads; first += kMostHeads) {
    const int64_t left = rows.num_heads - first, count = left < kMostHeads ? left : kMostHeads;
    if constexpr (kNorm) inverse_rms_of_heads<kWidth>(scales, x, count, norm.eps);
    for (int64_t h = 0; h < count; ++h, x += kWidth, y += kWidth) {
      const __m512 scale = _mm512_set1_ps(kNorm ? scales[h] : 1.0f);
      Lanes x_b[2 * kBlocks];
#pragma GCC unroll 4
      for (int b = 0; b < 2 * kBlocks; ++b) {
        x_b[b] = load_lanes(x + b * kNeighbours);
        if constexpr (kNorm) x_b[b] = x_b[b] * scale * w.w[b];
      }
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; ++b) {
        store_lanes(y + b * kNeighbours,
                    multiply_subtract(x_b[b], angles.cos[b], x_b[kBlocks + b] * angles.sin[b]));
        store_lanes(y + kHalf + b * kNeighbours,
                    multiply_add(x_b[kBlocks + b], angles.cos[b], x_b[b] * angles.sin[b]));
      }
    }
  }
}

// The gradient of one head with the rotation inverted.
template <int kBlocks>
struct TurnedBack {
  Lanes g[2 * kBlocks];
  TurnedBack(const BFloat16Bits* d_y, const Angles<kBlocks>& angles) {
    Lanes d[2 * kBlocks];
#pragma GCC unroll 4
    for (int b = 0; b < 2 * kBlocks; ++b) d[b] = load_lanes(d_y + b * kNeighbours);
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; ++b) {
      g[b] = multiply_add(d[b], angles.cos[b], d[kBlocks + b] * angles.sin[b]);
      g[kBlocks + b] = multiply_subtract(d[kBlocks + b], angles.cos[b], d[b] * angles.sin[b]);
    }
  }
};

template <bool kNorm, int kBlocks>
void backward_heads(BFloat16Bits* d_qkv, float* d_weight, const BFloat16Bits* d_y, const BFloat16Bits* qkv,
                    const float* cos, const float* sin, const BFloat16Bits* weight, const NormSettings& norm,
                    const HeadRows& rows) {
  constexpr int64_t kWidth = 2 * kBlocks * kNeighbours;
  const Weight<kBlocks> w(weight, norm.weight_offset);
  Lanes sums[2 * kBlocks];
  for (int b = 0; b < 2 * kBlocks; ++b)
    sums[b] = kNorm ? load_lanes(d_weight + b * kNeighbours) : zero_lanes();
  const Angles<kBlocks> angles(cos, sin);
  const BFloat16Bits* x = qkv;
  BFloat16Bits* d_x = d_qkv;
  for (int64_t h = 0; h < rows.num_heads; ++h, x += kWidth, d_x += kWidth, d_y += kWidth) {
    const TurnedBack<kBlocks> back(d_y, angles);
    if constexpr (!kNorm) {
#pragma GCC unroll 4
      for (int b = 0; b < 2 * kBlocks; ++b) store_lanes(d_x + b * kNeighbours, back.g[b]);
      continue;
    }
    __m512 squares = _mm512_setzero_ps();
    Lanes dot = zero_lanes();
#pragma GCC unroll 4
    for (int b = 0; b < 2 * kBlocks; ++b) {
      squares = add_squares(x + b * kNeighbours, squares);
      dot = multiply_add(back.g[b] * w.w[b], load_lanes(x + b * kNeighbours), dot);
    }
    const __m512 scale = broadcast_inverse_rms(squares, kWidth, norm.eps);
    const __m512 mean = scale * scale * _mm512_set1_ps(sum_of(dot) / static_cast<float>(kWidth));
#pragma GCC unroll 4
    for (int b = 0; b < 2 * kBlocks; ++b) {
      const Lanes x_b = load_lanes(x + b * kNeighbours);
      sums[b] = multiply_add(back.g[b], x_b * scale, sums[b]);
      store_lanes(d_x + b * kNeighbours, subtract_product(back.g[b] * w.w[b], x_b, mean) * scale);
    }
  }
  for (int b = 0; kNorm && b < 2 * kBlocks; ++b) store_lanes(d_weight + b * kNeighbours, sums[b]);
}
}  // namespace

void norm_rotate_rows(BFloat16Bits* y, const BFloat16Bits* qkv, const float* cos, const float* sin,
                      const BFloat16Bits* weight, const NormSettings& norm, const HeadRows& rows) {
  const auto all = rows.head_dim == 64 ? (weight ? forward_heads<true, 1> : forward_heads<false, 1>)
                                       : (weight ? forward_heads<true, 2> : forward_heads<false, 2>);
  all(y, qkv, cos, sin, weight, norm, rows);
}

void norm_rotate_backward_rows(BFloat16Bits* d_qkv, float* d_weight, float*, const BFloat16Bits* d_y,
                               const BFloat16Bits* qkv, const float* cos, const float* sin,
                               const BFloat16Bits* weight, const NormSettings& norm, const HeadRows& rows) {
  const auto all = rows.head_dim == 64 ? (weight ? backward_heads<true, 1> : backward_heads<false, 1>)
                                       : (weight ? backward_heads<true, 2> : backward_heads<false, 2>);
  all(d_qkv, d_weight, d_y, qkv, cos, sin, weight, norm, rows);
}

}  // namespace bough::bf16
