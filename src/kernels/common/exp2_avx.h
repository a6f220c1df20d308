// Powers of 2 for files with AVX-512 or AVX2 intrinsics. Internal linkage, because these files are compiled
// with different options.
#pragma once

#include <immintrin.h>

#include "kernels/common/avx.h"

namespace bough {

constexpr float kLn2 = 0.693147181f;
constexpr float kLog2E = 1.44269504f;

// Polynomial for 2^f, 0 <= f < 1, within one unit in the last place of fp32; highest coefficient first.
constexpr float kExp2Fp32[] = {2.170225489e-4f,
                               1.243968727e-3f,
                               9.678840637e-3f,
                               5.548334122e-2f,
                               2.402298301e-1f,
                               6.931470037e-1f,
                               1.0f};

#ifdef __AVX512F__

// 2^x = 2^floor(x) · 2^f, with a polynomial for 2^f, highest coefficient first. NaN stays NaN. If 2^x is
// outside the range of fp32, the result is 0 or infinity.
template <int kCoefficients>
static inline __m512 exp2_by(const float (&coefficients)[kCoefficients], __m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_set1_ps(coefficients[0]);
#pragma GCC unroll 8
  for (int i = 1; i < kCoefficients; ++i) y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(coefficients[i]));
  return _mm512_scalef_ps(y, x);
}

// 2^x with a relative error of at most 8e-5.
static inline __m512 exp2_rough(__m512 x) {
  return exp2_by({7.80245226e-2f, 2.26067155e-1f, 6.95833540e-1f, 9.99925218e-1f}, x);
}
// 2^x with a relative error of at most 3e-6. Rounding to bf16 has 4e-3.
static inline __m512 exp2_lanes(__m512 x) {
  return exp2_by({1.35341680e-2f, 5.20114611e-2f, 2.41442756e-1f, 6.93003835e-1f, 1.00000259f}, x);
}
// 2^x within one unit in the last place of fp32.
static inline __m512 exp2_fp32(__m512 x) {
  return exp2_by(kExp2Fp32, x);
}

#else

// 2^x within a few units in the last place of fp32, like exp2_by(). Below fp32's normal numbers it is 0.
static inline __m256 exp2_fp32(__m256 x) {
  // With NaN, min and max return their second operand.
  x = _mm256_min_ps(_mm256_set1_ps(128), _mm256_max_ps(_mm256_set1_ps(-150), x));
  const __m256 whole = _mm256_floor_ps(x), f = _mm256_sub_ps(x, whole);
  __m256 y = _mm256_set1_ps(kExp2Fp32[0]);
#pragma GCC unroll 6
  for (int i = 1; i < 7; ++i) y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(kExp2Fp32[i]));
  const __m256i exponent = _mm256_max_epi32(
      _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), _mm256_setzero_si256());
  return _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

#endif

}  // namespace bough
