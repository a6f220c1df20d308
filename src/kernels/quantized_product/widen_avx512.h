// int8 to bf16, exactly: an int8 in the upper half of a dword becomes an fp32 whose lower half is zero, so that the upper
// halves of two of them are a pair of bf16. For files written with intrinsics; internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace bough {
namespace {

inline __m512i widen(__m256i weights) {
  const __m512i words = _mm512_cvtepi8_epi16(weights);
  const __m512 even = _mm512_cvtepi32_ps(_mm512_slli_epi32(words, 16));
  const __m512 odd =
      _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
}

inline __mmask32 first(int64_t count) {
  return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
}

}  // namespace
}  // namespace bough
