// Products by the AVX512-BF16 dot products of pairs. A register holds a pair of dimensions of 16 keys, or 16
// dimensions of the values of a pair of tokens. With few entries, several pages or columns are computed at
// once to hide the latency of dot products.
#include <immintrin.h>

#include <cstring>

#include "kernels/paged_attention/paged_attention_products.h"

namespace bough::dots {

namespace {
using Element = BFloat16Bits;
constexpr int64_t kRows = kEntriesTogether, kPage = kPageTokens;

inline __m512bh pair_of(const Element* pair) {
  int32_t bits;
  std::memcpy(&bits, pair, sizeof bits);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
}
// Loads a line of a page, and prefetches the line at the same position of a later page.
inline __m512bh line_of(const Element* line, const Element* ahead) {
  _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
  return reinterpret_cast<__m512bh>(_mm512_loadu_si512(line));
}

template <int kEntries, int kPages>
void multiply_pages(float* scores, const Element* q, int64_t padded_H, const Element* const* keys,
                    const Element* const* ahead) {
  __m512 sum[kPages][kEntries];
  // All loops over sums are unrolled, so that the sums stay in registers.
#pragma GCC unroll 4
  for (int p = 0; p < kPages; ++p)
#pragma GCC unroll 16
    for (int e = 0; e < kEntries; ++e) sum[p][e] = _mm512_setzero_ps();
  for (int64_t h = 0; h < padded_H; h += 2) {
    __m512bh k[kPages];
#pragma GCC unroll 4
    for (int p = 0; p < kPages; ++p) k[p] = line_of(keys[p] + h * kPage, ahead[p] + h * kPage);
#pragma GCC unroll 16
    for (int e = 0; e < kEntries; ++e) {
      const __m512bh query = pair_of(q + e * padded_H + h);
#pragma GCC unroll 4
      for (int p = 0; p < kPages; ++p) sum[p][e] = _mm512_dpbf16_ps(sum[p][e], query, k[p]);
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < kPages; ++p)
#pragma GCC unroll 16
    for (int e = 0; e < kEntries; ++e) _mm512_store_ps(scores + (p * kRows + e) * kPage, sum[p][e]);
}

template <int kEntries>
void multiply_all(float* scores, const Element* q, int64_t padded_H, const PageFactors& k) {
  constexpr int kPages = kEntries <= 6 ? 4 : kEntries <= 12 ? 2 : 1;
  int64_t i = 0;
  for (; i + kPages <= k.count; i += kPages)
    multiply_pages<kEntries, kPages>(scores + i * kRows * kPage, q, padded_H, k.pages + i, k.ahead + i);
  if constexpr (kPages > 1)
    for (; i < k.count; ++i)
      multiply_pages<kEntries, 1>(scores + i * kRows * kPage, q, padded_H, k.pages + i, k.ahead + i);
}

template <int kEntries, int kColumns>
void add_columns(float* o, int64_t padded_H, const Element* weights, const PageFactors& v) {
  __m512 sum[kEntries][kColumns];
#pragma GCC unroll 16
  for (int e = 0; e < kEntries; ++e)
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) sum[e][c] = _mm512_loadu_ps(o + e * padded_H + 16 * c);
  for (int64_t i = 0; i < v.count; ++i)
    for (int64_t j = 0; j < kPage; j += 2) {
      __m512bh value[kColumns];
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c)
        value[c] = line_of(v.pages[i] + j * padded_H + 32 * c, v.ahead[i] + j * padded_H + 32 * c);
#pragma GCC unroll 16
      for (int e = 0; e < kEntries; ++e) {
        const __m512bh weight = pair_of(weights + (i * kRows + e) * kPage + j);
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) sum[e][c] = _mm512_dpbf16_ps(sum[e][c], weight, value[c]);
      }
    }
#pragma GCC unroll 16
  for (int e = 0; e < kEntries; ++e)
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) _mm512_storeu_ps(o + e * padded_H + 16 * c, sum[e][c]);
}

template <int kEntries>
void add_all(float* o, int64_t padded_H, const Element* weights, const PageFactors& v) {
  constexpr int kColumns = kEntries <= 6 ? 4 : kEntries <= 12 ? 2 : 1;
  const Element* pages[kMostPages];
  const Element* ahead[kMostPages];
  const auto columns_from = [&](int64_t column) {
    for (int64_t i = 0; i < v.count; ++i) {
      pages[i] = v.pages[i] + 2 * column;
      ahead[i] = v.ahead[i] + 2 * column;
    }
    return PageFactors{pages, ahead, v.count};
  };
  int64_t column = 0;
  for (; column + 16 * kColumns <= padded_H; column += 16 * kColumns)
    add_columns<kEntries, kColumns>(o + column, padded_H, weights, columns_from(column));
  if constexpr (kColumns == 4)  // a multiple of 32
    if (column < padded_H) add_columns<kEntries, 2>(o + column, padded_H, weights, columns_from(column));
}

#define BOUGH_EACH_NUMBER_OF_ENTRIES(CALL) \
  CALL(1)                                  \
  CALL(2)                                  \
  CALL(3)                                  \
  CALL(4)                                  \
  CALL(5) CALL(6) CALL(7) CALL(8) CALL(9) CALL(10) CALL(11) CALL(12) CALL(13) CALL(14) CALL(15) CALL(16)
}  // namespace

void multiply_keys(float* scores, const Element* q, int64_t entries, int64_t padded_H,
                   const PageFactors& keys) {
  switch (entries) {
#define BOUGH_CASE(n) \
  case n: return multiply_all<n>(scores, q, padded_H, keys);
    BOUGH_EACH_NUMBER_OF_ENTRIES(BOUGH_CASE)
#undef BOUGH_CASE
  }
}

void add_values(float* o, int64_t entries, int64_t padded_H, const Element* weights,
                const PageFactors& values) {
  switch (entries) {
#define BOUGH_CASE(n) \
  case n: return add_all<n>(o, padded_H, weights, values);
    BOUGH_EACH_NUMBER_OF_ENTRIES(BOUGH_CASE)
#undef BOUGH_CASE
  }
}

}  // namespace bough::dots
