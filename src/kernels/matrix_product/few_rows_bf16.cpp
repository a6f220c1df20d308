// Products of one to four rows of x with a weight, each output as the dot product of a row of x and a row of
// the weight. Each cache line of the weight is read once and multiplied with all rows of x. dot_products.h
// would instead need the weight packed by 16 of its rows.
#include <immintrin.h>

#include "kernels/matrix_product/bf16_products.h"

namespace bough::dots {

namespace {
constexpr int64_t kTogether = 4;  // outputs
constexpr int64_t kLine = 32;     // elements

inline __m512bh line(const BFloat16Bits* p, int64_t left) {
  const __mmask32 lanes = left >= kLine ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
  return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(lanes, p));
}

inline __m128 widen(const BFloat16Bits* p, __mmask8 lanes) {
  return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_maskz_loadu_epi16(lanes, p)), 16));
}

// Returns four sums: those of the lanes of a, of b, of c and of d.
inline __m128 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
  const auto fold = [](__m512 x) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  };
  return _mm_hadd_ps(_mm_hadd_ps(fold(a), fold(b)), _mm_hadd_ps(fold(c), fold(d)));
}

template <int kRows>
void multiply(const FewRows& p, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; n += kTogether) {
    const int64_t count = end - n < kTogether ? end - n : kTogether;
    const BFloat16Bits* weight[kTogether];
    for (int64_t i = 0; i < kTogether; ++i)
      weight[i] = p.weight + (n + (i < count ? i : 0)) * p.weight_stride;
    // Distance to the next kTogether rows of the weight, which the products prefetch; 0 if there are none.
    const int64_t further = n + 2 * kTogether <= end ? kTogether * p.weight_stride : 0;
    __m512 sum[kRows][kTogether];
    // All loops over `sum` are unrolled, so that the sums stay in registers.
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < kTogether; ++i) sum[r][i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < p.depth; k += kLine) {
      __m512bh w[kTogether];
#pragma GCC unroll 4
      for (int i = 0; i < kTogether; ++i) {
        w[i] = line(weight[i] + k, p.depth - k);
        _mm_prefetch(reinterpret_cast<const char*>(weight[i] + further + k), _MM_HINT_T0);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m512bh x = line(p.x + r * p.x_stride + k, p.depth - k);
#pragma GCC unroll 4
        for (int i = 0; i < kTogether; ++i) sum[r][i] = _mm512_dpbf16_ps(sum[r][i], x, w[i]);
      }
    }
    const auto lanes = static_cast<__mmask8>((1 << count) - 1);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      __m128 y = sums_of(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
      if (p.bias) y = _mm_add_ps(y, widen(p.bias + n, lanes));
      if (p.residual) y = _mm_add_ps(y, widen(p.residual + r * p.y_stride + n, lanes));
      _mm_mask_storeu_epi16(p.y + r * p.y_stride + n, lanes, reinterpret_cast<__m128i>(_mm_cvtneps_pbh(y)));
    }
  }
}
}  // namespace

void multiply_few_rows(const FewRows& product, int64_t begin, int64_t end) {
  switch (product.rows) {
    case 1: return multiply<1>(product, begin, end);
    case 2: return multiply<2>(product, begin, end);
    case 3: return multiply<3>(product, begin, end);
    case 4: return multiply<4>(product, begin, end);
  }
}

}  // namespace bough::dots
