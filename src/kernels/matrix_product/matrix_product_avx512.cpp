// fp32 products: 12 x 32 sums in 24 registers, 32 elements of a row of B in two, elements of A broadcast.
#include <immintrin.h>

#include "kernels/matrix_product/matrix_product_tiles.h"
#include "kernels/matrix_product/transpose_16x16.h"
#include "kernels/matrix_product/upcoming_lines.h"

namespace bough::avx512 {

namespace {
inline __mmask16 first(int64_t count) {
  return count >= 16 ? static_cast<__mmask16>(0xFFFF)
                     : static_cast<__mmask16>((1u << (count < 0 ? 0 : count)) - 1);
}

constexpr int64_t kStep = 8;  // depth steps between two prefetches

// The number of columns of b: kHalf is at most 16 and needs half of the multiply-adds, kSome is 17 to 31,
// kAll is 32 and needs no load masks.
enum class Columns { kHalf, kSome, kAll };

// a[i][k] is at a[i * a_stride + k], or at a[k * a_stride + i] if kTurned.
template <Columns kColumns, int kRows, bool kTurned>
void multiply_rows(float* c, int64_t c_stride, bool accumulate, const float* a, int64_t a_stride,
                   const float* b, int64_t b_stride, int64_t columns, int64_t depth, const Upcoming& read) {
  constexpr bool kTwo = kColumns != Columns::kHalf, kAll = kColumns == Columns::kAll;
  __m512 sum[kRows][2];
  const __mmask16 low = first(columns), high = first(columns - 16);
  // All loops over `sum` are unrolled, so that the sums stay in registers.
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
    sum[i][0] = accumulate ? _mm512_maskz_loadu_ps(low, c + i * c_stride) : _mm512_setzero_ps();
    if (kTwo)
      sum[i][1] = accumulate ? _mm512_maskz_loadu_ps(high, c + i * c_stride + 16) : _mm512_setzero_ps();
  }
  UpcomingLines upcoming(read, kBlockRows, (depth + kStep - 1) / kStep);
  for (int64_t k = 0; k < depth; ++k) {
    if (k % kStep == 0) upcoming.read_soon();
    const __m512 b_low = kAll ? _mm512_loadu_ps(b) : _mm512_maskz_loadu_ps(low, b);
    const __m512 b_high = kAll   ? _mm512_loadu_ps(b + 16)
                          : kTwo ? _mm512_maskz_loadu_ps(high, b + 16)
                                 : _mm512_setzero_ps();
    b += b_stride;
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const __m512 value = _mm512_set1_ps(kTurned ? a[i] : a[i * a_stride]);
      sum[i][0] = _mm512_fmadd_ps(value, b_low, sum[i][0]);
      if (kTwo) sum[i][1] = _mm512_fmadd_ps(value, b_high, sum[i][1]);
    }
    a += kTurned ? a_stride : 1;
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
    _mm512_mask_storeu_ps(c + i * c_stride, low, sum[i][0]);
    if (kTwo) _mm512_mask_storeu_ps(c + i * c_stride + 16, high, sum[i][1]);
  }
}

template <Columns kColumns, bool kTurned>
void multiply(float* c, int64_t c_stride, bool accumulate, const float* a, int64_t a_stride, const float* b,
              int64_t b_stride, int64_t rows, int64_t columns, int64_t depth, const Upcoming& read) {
  switch (rows) {
#define BOUGH_ROWS(n)                                                                                      \
  case n:                                                                                                  \
    return multiply_rows<kColumns, n, kTurned>(c, c_stride, accumulate, a, a_stride, b, b_stride, columns, \
                                               depth, read);
    BOUGH_ROWS(1)
    BOUGH_ROWS(2)
    BOUGH_ROWS(3)
    BOUGH_ROWS(4)
    BOUGH_ROWS(5)
    BOUGH_ROWS(6)
    BOUGH_ROWS(7)
    BOUGH_ROWS(8)
    BOUGH_ROWS(9)
    BOUGH_ROWS(10)
    BOUGH_ROWS(11)
    BOUGH_ROWS(12)
#undef BOUGH_ROWS
  }
}
}  // namespace

void pack_panel(float* panel, const float* source, int64_t stride, bool transposed, int64_t depth,
                int64_t columns) {
  if (!transposed) {
    const __mmask16 low = first(columns), high = first(columns - 16);
    for (int64_t k = 0; k < depth; ++k) {
      _mm512_store_ps(panel + k * kPanelColumns, _mm512_maskz_loadu_ps(low, source + k * stride));
      _mm512_store_ps(panel + k * kPanelColumns + 16, _mm512_maskz_loadu_ps(high, source + k * stride + 16));
    }
    return;
  }
  for (int64_t k = 0; k < depth; k += 16) {
    const __mmask16 columns_of_k = first(depth - k);
    const int64_t count = depth - k < 16 ? depth - k : 16;
    for (int64_t half = 0; half < 2; ++half) {
      __m512i r[16];
      for (int64_t i = 0; i < 16; ++i)
        r[i] = half * 16 + i < columns
                   ? _mm512_maskz_loadu_epi32(columns_of_k, source + (half * 16 + i) * stride + k)
                   : _mm512_setzero_si512();
      transpose_16x16(r);
      for (int64_t i = 0; i < count; ++i)
        _mm512_store_si512(panel + (k + i) * kPanelColumns + half * 16, r[i]);
    }
  }
}

void pack_transposed_block(float* block, const float* source, int64_t stride, int64_t rows, int64_t depth) {
  const __mmask16 mask = first(rows);
  for (int64_t k = 0; k < depth; ++k)
    _mm512_mask_storeu_ps(block + k * kBlockRows, first(kBlockRows),
                          _mm512_maskz_loadu_ps(mask, source + k * stride));
}

void multiply_block(float* c, int64_t c_stride, bool accumulate, const float* a, int64_t a_stride,
                    bool turned, const float* b, int64_t b_stride, int64_t rows, int64_t columns,
                    int64_t depth, const Upcoming& read) {
  const auto call =
      columns == kPanelColumns ? (turned ? multiply<Columns::kAll, true> : multiply<Columns::kAll, false>)
      : columns > 16           ? (turned ? multiply<Columns::kSome, true> : multiply<Columns::kSome, false>)
                               : (turned ? multiply<Columns::kHalf, true> : multiply<Columns::kHalf, false>);
  call(c, c_stride, accumulate, a, a_stride, b, b_stride, rows, columns, depth, read);
}

void store_block_turned(float* c, int64_t c_stride, const float* block, int64_t rows, int64_t columns) {
  const __mmask16 mask = first(rows);
  for (int64_t half = 0; half < columns; half += 16) {
    __m512i r[16];
    for (int64_t i = 0; i < 16; ++i)
      r[i] = i < rows ? _mm512_load_si512(block + i * kPanelColumns + half) : _mm512_setzero_si512();
    transpose_16x16(r);
    for (int64_t j = 0; j < 16 && half + j < columns; ++j)
      _mm512_mask_storeu_epi32(c + (half + j) * c_stride, mask, r[j]);
  }
}

}  // namespace bough::avx512
