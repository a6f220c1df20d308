// Powers of 2 for files with AVX-512 intrinsics. Internal linkage, because these files are compiled with
// different options.
#pragma once

#include <immintrin.h>

namespace bough {

constexpr float kLn2 = 0.693147181f;
constexpr float kLog2E = 1.44269504f;
constexpr float kLowest = -3.0e38f;  // maximum of no values; finite, so that a difference of two is not NaN

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
  return exp2_by({2.170225489e-4f, 1.243968727e-3f, 9.678840637e-3f, 5.548334122e-2f, 2.402298301e-1f,
                  6.931470037e-1f, 1.0f},
                 x);
}

}  // namespace bough
