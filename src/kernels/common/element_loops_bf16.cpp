// Row loops in bf16 by AVX512-BF16, 32 neighbouring elements at a time. element_loops_isa.cpp has the
// equations.
#include "kernels/common/bf16_lanes.h"
#include "kernels/common/element_loops.h"
#include "kernels/common/exp2_avx512.h"

namespace bough::bf16 {

namespace {
constexpr int64_t kTogether = 4;  // rows or heads whose square roots are computed in one vector
}  // namespace

// rms_norm.h

namespace {
// RMSNorm reads one row after the other. Reading a line of each row in turn would halve the memory rate.
template <int64_t kRows>
void forward_rows(BFloat16Bits* y, float* rstd, const BFloat16Bits* x, const BFloat16Bits* weight,
                  int64_t width, const NormSettings& norm) {
  const __m512 offset = _mm512_set1_ps(static_cast<float>(norm.weight_offset));
  __m512 squares[kRows];
#pragma GCC unroll 4
  for (int64_t i = 0; i < kRows; ++i) {
    squares[i] = _mm512_setzero_ps();
    for (int64_t d = 0; d < width; d += kNeighbours) squares[i] = add_squares(x + i * width + d, squares[i]);
  }
#pragma GCC unroll 4
  for (int64_t i = 0; i < kRows; ++i) {
    const float mean = _mm512_reduce_add_ps(squares[i]) / static_cast<float>(width);
    rstd[i] = 1 / __builtin_sqrtf(mean + static_cast<float>(norm.eps));
  }
  for (int64_t i = 0; i < kRows; ++i, x += width, y += width) {
    const __m512 factor = _mm512_set1_ps(rstd[i]);
    for (int64_t d = 0; d < width; d += kNeighbours)
      store_lanes(y + d, load_lanes(x + d) * factor * (load_lanes(weight + d) + offset));
  }
}
}  // namespace

void rms_norm_rows(BFloat16Bits* y, float* rstd, const BFloat16Bits* x, const BFloat16Bits* weight,
                   int64_t num_rows, int64_t width, const NormSettings& norm) {
  int64_t r = 0;
  for (; r + kTogether <= num_rows; r += kTogether)
    forward_rows<kTogether>(y + r * width, rstd + r, x + r * width, weight, width, norm);
  for (; r < num_rows; ++r) forward_rows<1>(y + r * width, rstd + r, x + r * width, weight, width, norm);
}

namespace {
template <bool kResidual, bool kAgain>
void backward_row(BFloat16Bits* d_x, BFloat16Bits* y, float* d_weight, const BFloat16Bits* d_y,
                  const BFloat16Bits* x, const BFloat16Bits* weight, const BFloat16Bits* residual,
                  float scale, int64_t width, __m512 offset) {
  Lanes dot = zero_lanes();
  for (int64_t d = 0; d < width; d += kNeighbours)
    dot = multiply_add(load_lanes(d_y + d) * (load_lanes(weight + d) + offset), load_lanes(x + d), dot);
  const __m512 mean = _mm512_set1_ps(sum_of(dot) * scale * scale / static_cast<float>(width));
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t d = 0; d < width; d += kNeighbours) {
    const Lanes x_d = load_lanes(x + d), d_y_d = load_lanes(d_y + d), w_d = load_lanes(weight + d) + offset;
    const Lanes normal = x_d * factor;
    store_ordered(d_weight + d, multiply_add(d_y_d, normal, load_ordered(d_weight + d)));
    Lanes d_x_d = subtract_product(d_y_d * w_d, x_d, mean) * factor;
    if constexpr (kResidual) d_x_d = d_x_d + load_lanes(residual + d);
    store_lanes(d_x + d, d_x_d);
    if constexpr (kAgain) store_lanes(y + d, normal * w_d);
  }
}
}  // namespace

void rms_norm_backward_rows(BFloat16Bits* d_x, BFloat16Bits* y, float* d_weight, const BFloat16Bits* d_y,
                            const BFloat16Bits* x, const BFloat16Bits* weight, const BFloat16Bits* residual,
                            const float* rstd, int64_t num_rows, int64_t width, double weight_offset) {
  const __m512 offset = _mm512_set1_ps(static_cast<float>(weight_offset));
  const auto row = residual ? (y ? backward_row<true, true> : backward_row<true, false>)
                            : (y ? backward_row<false, true> : backward_row<false, false>);
  to_lane_order(d_weight, width);
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t at = r * width;
    row(d_x + at, y ? y + at : nullptr, d_weight, d_y + at, x + at, weight,
        residual ? residual + at : nullptr, rstd[r], width, offset);
  }
  from_lane_order(d_weight, width);
}

// swiglu.h

namespace {
// Returns 1 / (1 + exp(-x)) with an error of at most 1.4e-4; bf16's precision is 4e-3. NaN stays NaN.
inline __m512 sigmoid(__m512 x) {
  const __m512 power = exp2_rough(_mm512_mul_ps(x, _mm512_set1_ps(-kLog2E)));
  return _mm512_rcp14_ps(_mm512_add_ps(power, _mm512_set1_ps(1)));
}
inline Lanes sigmoid(const Lanes& x) {
  return {sigmoid(x.even), sigmoid(x.odd)};
}

// These are the constants of gate_argument and gate_steepness in element_loops_isa.cpp.
constexpr float kGelu = 1.5957691216f, kGeluCube = kGelu * 0.044715f;
inline Lanes cubic(const Lanes& g, float linear, float cube) {
  const __m512 a = _mm512_set1_ps(linear), b = _mm512_set1_ps(cube);
  return g * multiply_add(g * g, {b, b}, {a, a});
}
template <GateActivation kActivation>
inline Lanes gate_argument(const Lanes& g) {
  return kActivation == GateActivation::kSilu ? g : cubic(g, kGelu, kGeluCube);
}
template <GateActivation kActivation>
inline Lanes gate_steepness(const Lanes& g) {
  return kActivation == GateActivation::kSilu ? g : cubic(g, kGelu, 3 * kGeluCube);
}

template <GateActivation kActivation>
void gated_rows(BFloat16Bits* y, const BFloat16Bits* gate_up, int64_t num_rows, int64_t width) {
  for (int64_t r = 0; r < num_rows; ++r, y += width, gate_up += 2 * width)
    for (int64_t f = 0; f < width; f += kNeighbours) {
      const Lanes g = load_lanes(gate_up + f);
      store_lanes(y + f, g * sigmoid(gate_argument<kActivation>(g)) * load_lanes(gate_up + width + f));
    }
}

template <GateActivation kActivation>
void gated_backward_rows(BFloat16Bits* d_gate_up, BFloat16Bits* y, const BFloat16Bits* d_y,
                         const BFloat16Bits* gate_up, int64_t num_rows, int64_t width) {
  const __m512 one = _mm512_set1_ps(1);
  for (int64_t r = 0; r < num_rows;
       ++r, y += width, d_y += width, gate_up += 2 * width, d_gate_up += 2 * width)
    for (int64_t f = 0; f < width; f += kNeighbours) {
      const Lanes g = load_lanes(gate_up + f), u = load_lanes(gate_up + width + f), d = load_lanes(d_y + f);
      const Lanes s = sigmoid(gate_argument<kActivation>(g)), d_s = d * s, gs = g * s;
      const Lanes slope = multiply_add(gate_steepness<kActivation>(g),
                                       {_mm512_sub_ps(one, s.even), _mm512_sub_ps(one, s.odd)}, {one, one});
      store_lanes(d_gate_up + f, d_s * u * slope);
      store_lanes(d_gate_up + width + f, d * gs);
      store_lanes(y + f, gs * u);
    }
}
}  // namespace

void swiglu_rows(BFloat16Bits* y, const BFloat16Bits* gate_up, int64_t num_rows, int64_t width,
                 GateActivation activation) {
  const auto rows = activation == GateActivation::kSilu ? gated_rows<GateActivation::kSilu>
                                                        : gated_rows<GateActivation::kGeluTanh>;
  rows(y, gate_up, num_rows, width);
}

void swiglu_backward_rows(BFloat16Bits* d_gate_up, BFloat16Bits* y, const BFloat16Bits* d_y,
                          const BFloat16Bits* gate_up, int64_t num_rows, int64_t width,
                          GateActivation activation) {
  const auto rows = activation == GateActivation::kSilu ? gated_backward_rows<GateActivation::kSilu>
                                                        : gated_backward_rows<GateActivation::kGeluTanh>;
  rows(d_gate_up, y, d_y, gate_up, num_rows, width);
}

// qk_norm_rotary.h
//
// Forward first computes the inverse RMS of up to kMostHeads heads, kTogether of them in one vector. This
// first loop brings the heads' lines into the cache in order. Another order would halve the memory rate.

namespace {
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
