// For files written with AVX-512 intrinsics; internal linkage, since each is compiled with options of its own.
#pragma once

#include <immintrin.h>

namespace bough {

constexpr float kLn2 = 0.693147181f;
constexpr float kLog2E = 1.44269504f;
constexpr float kLowest = -3.0e38f;  // a maximum of nothing; finite: two of them differ by 0, not by NaN

// 2^x = 2^floor(x) · 2^f, 2^f by a polynomial of degree 4, within 3e-6: bf16 keeps 4e-3. NaN stays NaN; beyond the range
// it is 0 or infinity.
static inline __m512 exp2_lanes(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_set1_ps(1.35341680e-2f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.20114611e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.41442756e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.93003835e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.00000259f));
  return _mm512_scalef_ps(y, x);
}

// The same within one unit in the last place, by a polynomial of degree 6.
static inline __m512 exp2_fp32(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_set1_ps(2.170225489e-4f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.243968727e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.678840637e-3f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.548334122e-2f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.402298301e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.931470037e-1f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, x);
}

}  // namespace bough
