// Sums of bf16 products, up to 11 rows x 32 columns in 22 registers. Each pair of neighbouring elements of a
// row of A is broadcast and multiplied with the pairs of 16 columns of B (Intel SDM, VDPBF16PS). Included by
// files compiled for AVX512-BF16; internal linkage.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels/matrix_product/bf16_layout.h"

namespace bough::dots {
namespace {

using bf16::kTileBytes;
using bf16::kTileStride;

constexpr int64_t kRowsTogether = 11;  // 32 rows are 11 + 11 + 10
constexpr int64_t kPairs = 16;         // pairs in 32 elements of the inner dimension
constexpr int64_t kPairBytes = 4;

// The layout of both factors within 32 elements of the inner dimension (the depth), in bytes.
//   A: the pairs of a row are adjacent; rows are a_row apart
//   B: pairs p of columns 0 to 15 are adjacent; pairs p + 1 begin b_pair after them; columns 16 to 31 begin
//      b_high after columns 0 to 15
struct Layout {
  int64_t a_row = kTileStride;
  int64_t b_pair = kTileStride, b_high = kTileBytes;
};
// The 32 columns of sums in memory. Rows are `stride` floats apart; columns 16 to 31 begin `high` floats
// after columns 0 to 15.
struct Sums {
  float* c;
  int64_t stride, high;
  bool accumulate;
};

// Computes kRows x (16 · kVectors) sums in `steps` steps of depth 32. step(i, a, b) must set a and b to the
// addresses of the first row of A and the first pair of B of step i, which has depths 32i to 32i + 31.
template <int kRows, int kVectors, class Step>
inline void dot_rows(const Sums& to, const Layout& layout, int64_t steps, Step&& step) {
  __m512 sum[kRows][2];
  // All loops over `sum` are unrolled, so that the sums stay in registers.
#pragma GCC unroll 11
  for (int i = 0; i < kRows; ++i) {
    const float* row = to.c + i * to.stride;
    sum[i][0] = to.accumulate ? _mm512_loadu_ps(row) : _mm512_setzero_ps();
    if (kVectors == 2) sum[i][1] = to.accumulate ? _mm512_loadu_ps(row + to.high) : _mm512_setzero_ps();
  }
  for (int64_t s = 0; s < steps; ++s) {
    const char* a;
    const char* b;
    step(s, a, b);
#pragma GCC unroll 2
    for (int64_t pair = 0; pair < kPairs; ++pair, a += kPairBytes, b += layout.b_pair) {
      const auto low = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b));
      const auto high =
          kVectors == 2 ? reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + layout.b_high)) : low;
#pragma GCC unroll 11
      for (int i = 0; i < kRows; ++i) {
        int32_t bits;
        std::memcpy(&bits, a + i * layout.a_row, sizeof bits);
        const auto value = reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
        sum[i][0] = _mm512_dpbf16_ps(sum[i][0], value, low);
        if (kVectors == 2) sum[i][1] = _mm512_dpbf16_ps(sum[i][1], value, high);
      }
    }
  }
#pragma GCC unroll 11
  for (int i = 0; i < kRows; ++i) {
    float* row = to.c + i * to.stride;
    _mm512_storeu_ps(row, sum[i][0]);
    if (kVectors == 2) _mm512_storeu_ps(row + to.high, sum[i][1]);
  }
}

// Computes rows kFirst to kFirst + kRows - 1 of sums. `step` is as for dot_rows().
template <int kFirst, int kRows, int kVectors, class Step>
inline void dot_rows_from(const Sums& to, const Layout& layout, int64_t steps, Step&& step) {
  dot_rows<kRows, kVectors>({to.c + kFirst * to.stride, to.stride, to.high, to.accumulate}, layout, steps,
                            [&](int64_t s, const char*& a, const char*& b) {
                              step(s, a, b);
                              a += kFirst * layout.a_row;
                            });
}

// Computes 32 rows of sums.
template <int kVectors = 2, class Step>
inline void dot_block(const Sums& to, const Layout& layout, int64_t steps, Step&& step) {
  dot_rows_from<0, 11, kVectors>(to, layout, steps, step);
  dot_rows_from<11, 11, kVectors>(to, layout, steps, step);
  dot_rows_from<22, 10, kVectors>(to, layout, steps, step);
}

// Computes 16 rows of sums.
template <class Step>
inline void dot_half_block(const Sums& to, const Layout& layout, int64_t steps, Step&& step) {
  dot_rows_from<0, 8, 2>(to, layout, steps, step);
  dot_rows_from<8, 8, 2>(to, layout, steps, step);
}

}  // namespace
}  // namespace bough::dots
