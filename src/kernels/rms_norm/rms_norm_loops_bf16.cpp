// AVX512-BF16, 32 neighbouring elements at a time. rms_norm_loops_isa.cpp has the equations.
#include "kernels/common/bf16_lanes.h"
#include "kernels/rms_norm/rms_norm_loops.h"

namespace bough::bf16 {

namespace {
constexpr int64_t kTogether = 4;  // rows whose square roots are computed in one vector

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

}  // namespace bough::bf16
