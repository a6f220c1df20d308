// 32 adjacent elements in two fp32 registers. For files compiled for AVX512-BF16; internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {
namespace {

constexpr int64_t kNeighbours = 32;

// 32 adjacent elements, divided into those at even and at odd indices. For bf16 this takes a shift and a
// mask.
struct Lanes {
  __m512 even, odd;
};

inline Lanes load_lanes(const BFloat16Bits* p) {
  const __m512i pairs = _mm512_loadu_si512(p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))))};
}
inline Lanes load_lanes(const float* p) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  const __m512 low = _mm512_loadu_ps(p), high = _mm512_loadu_ps(p + 16);
  return {_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high)};
}
// Stores 32 elements in their original order; bf16 is rounded to nearest even.
inline void store_lanes(BFloat16Bits* p, const Lanes& x) {
  const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(x.odd, x.even));
  const __m512i in_turn = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                           7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16(in_turn, halves));
}
inline void store_lanes(float* p, const Lanes& x) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  _mm512_storeu_ps(p, _mm512_permutex2var_ps(x.even, low, x.odd));
  _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(x.even, high, x.odd));
}

inline Lanes operator*(const Lanes& a, const Lanes& b) {
  return {_mm512_mul_ps(a.even, b.even), _mm512_mul_ps(a.odd, b.odd)};
}
inline Lanes operator*(const Lanes& a, __m512 b) {
  return {_mm512_mul_ps(a.even, b), _mm512_mul_ps(a.odd, b)};
}
inline Lanes operator+(const Lanes& a, __m512 b) {
  return {_mm512_add_ps(a.even, b), _mm512_add_ps(a.odd, b)};
}
inline Lanes operator+(const Lanes& a, const Lanes& b) {
  return {_mm512_add_ps(a.even, b.even), _mm512_add_ps(a.odd, b.odd)};
}
// Fused: a · b + c, a · b - c and c - a · b.
inline Lanes multiply_add(const Lanes& a, const Lanes& b, const Lanes& c) {
  return {_mm512_fmadd_ps(a.even, b.even, c.even), _mm512_fmadd_ps(a.odd, b.odd, c.odd)};
}
inline Lanes multiply_subtract(const Lanes& a, const Lanes& b, const Lanes& c) {
  return {_mm512_fmsub_ps(a.even, b.even, c.even), _mm512_fmsub_ps(a.odd, b.odd, c.odd)};
}
inline Lanes subtract_product(const Lanes& c, const Lanes& a, __m512 b) {
  return {_mm512_fnmadd_ps(a.even, b, c.even), _mm512_fnmadd_ps(a.odd, b, c.odd)};
}
inline Lanes zero_lanes() {
  return {_mm512_setzero_ps(), _mm512_setzero_ps()};
}
// Returns sum + the squares of 32 adjacent elements, two per lane.
inline __m512 add_squares(const BFloat16Bits* p, __m512 sum) {
  const auto pairs = reinterpret_cast<__m512bh>(_mm512_loadu_si512(p));
  return _mm512_dpbf16_ps(sum, pairs, pairs);
}
inline float sum_of(const Lanes& x) {
  return _mm512_reduce_add_ps(_mm512_add_ps(x.even, x.odd));
}
// Returns four sums: for each vector, the sum of its 16 lanes.
inline __m128 sums_across(const __m512 (&x)[4]) {
  const auto quarter = [&](int i) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x[i]), _mm512_extractf32x8_ps(x[i], 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  };
  return _mm_hadd_ps(_mm_hadd_ps(quarter(0), quarter(1)), _mm_hadd_ps(quarter(2), quarter(3)));
}

// Load and store sums that are in lane order: 16 elements at even indices, then 16 at odd indices.
inline Lanes load_ordered(const float* sums) {
  return {_mm512_loadu_ps(sums), _mm512_loadu_ps(sums + 16)};
}
inline void store_ordered(float* sums, const Lanes& x) {
  _mm512_storeu_ps(sums, x.even);
  _mm512_storeu_ps(sums + 16, x.odd);
}
// Convert `width` sums in place to lane order and back. Between the two calls, Lanes are added to the sums
// without a shuffle.
inline void to_lane_order(float* sums, int64_t width) {
  for (int64_t d = 0; d < width; d += kNeighbours) store_ordered(sums + d, load_lanes(sums + d));
}
inline void from_lane_order(float* sums, int64_t width) {
  for (int64_t d = 0; d < width; d += kNeighbours) store_lanes(sums + d, load_ordered(sums + d));
}

}  // namespace
}  // namespace bough
