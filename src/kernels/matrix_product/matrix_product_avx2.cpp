// fp32 products: 6 x 16 sums in 12 registers, 16 elements of a row of B in two, elements of A broadcast.
#include <immintrin.h>

#include "kernels/matrix_product/matrix_product_tiles.h"
#include "kernels/matrix_product/upcoming_lines.h"

namespace bough::avx2 {

namespace {
constexpr int64_t kLanes = 8, kRowsPerStep = 6;
constexpr int64_t kStep = 8;  // depth steps between two prefetches

inline int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// The mask of maskload and maskstore for the first `count` of 8 lanes; count may be below 0 or above 8.
inline __m256i first(int64_t count) {
  const __m256i numbers = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), numbers);
}

// c[kRows][16] = or += a·b. kAll: all 16 columns, without masks; else the first `columns`. a[i][k] is at
// a[i * a_stride + k], or at a[k * a_stride + i] if kTurned.
template <int kRows, bool kAll, bool kTurned>
void multiply_rows(float* c, int64_t c_stride, bool accumulate, const float* a, int64_t a_stride,
                   const float* b, int64_t b_stride, int64_t columns, int64_t depth,
                   UpcomingLines& upcoming) {
  __m256 sum[kRows][2];
  const __m256i low = first(columns), high = first(columns - kLanes);
  const auto load = [&](const float* source, bool upper) {
    if (kAll) return _mm256_loadu_ps(source);
    return _mm256_maskload_ps(source, upper ? high : low);
  };
  // All loops over `sum` are unrolled, so that the sums stay in registers.
#pragma GCC unroll 6
  for (int i = 0; i < kRows; ++i) {
    sum[i][0] = accumulate ? load(c + i * c_stride, false) : _mm256_setzero_ps();
    sum[i][1] = accumulate ? load(c + i * c_stride + kLanes, true) : _mm256_setzero_ps();
  }
  for (int64_t k = 0; k < depth; ++k) {
    if (k % kStep == 0) upcoming.read_soon();
    const __m256 b_low = load(b, false), b_high = load(b + kLanes, true);
    b += b_stride;
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i) {
      const __m256 value = _mm256_broadcast_ss(a + (kTurned ? i : i * a_stride));
      sum[i][0] = _mm256_fmadd_ps(value, b_low, sum[i][0]);
      sum[i][1] = _mm256_fmadd_ps(value, b_high, sum[i][1]);
    }
    a += kTurned ? a_stride : 1;
  }
#pragma GCC unroll 6
  for (int i = 0; i < kRows; ++i) {
    float* out = c + i * c_stride;
    if (kAll) {
      _mm256_storeu_ps(out, sum[i][0]);
      _mm256_storeu_ps(out + kLanes, sum[i][1]);
    } else {
      _mm256_maskstore_ps(out, low, sum[i][0]);
      _mm256_maskstore_ps(out + kLanes, high, sum[i][1]);
    }
  }
}

template <bool kAll, bool kTurned>
void multiply(float* c, int64_t c_stride, bool accumulate, const float* a, int64_t a_stride, const float* b,
              int64_t b_stride, int64_t rows, int64_t columns, int64_t depth, UpcomingLines& upcoming) {
  switch (rows) {
#define BOUGH_ROWS(n)                                                                                  \
  case n:                                                                                              \
    return multiply_rows<n, kAll, kTurned>(c, c_stride, accumulate, a, a_stride, b, b_stride, columns, \
                                           depth, upcoming);
    BOUGH_ROWS(1)
    BOUGH_ROWS(2)
    BOUGH_ROWS(3)
    BOUGH_ROWS(4)
    BOUGH_ROWS(5)
    BOUGH_ROWS(6)
#undef BOUGH_ROWS
  }
}

// Transposes 8 vectors of 8 elements in place.
inline void transpose_8x8(__m256 (&r)[8]) {
  __m256 pair[8], quad[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pair[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    pair[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    quad[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0x44);
    quad[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0xEE);
    quad[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
    quad[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0xEE);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x31);
  }
}
}  // namespace

void pack_panel(float* panel, const float* source, int64_t stride, bool transposed, int64_t depth,
                int64_t columns) {
  if (!transposed) {
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t n = 0; n < kPanelColumns; n += kLanes)
        _mm256_store_ps(panel + k * kPanelColumns + n,
                        _mm256_maskload_ps(source + k * stride + n, first(columns - n)));
    return;
  }
  for (int64_t k = 0; k < depth; k += kLanes) {
    const __m256i columns_of_k = first(depth - k);
    const int64_t count = least(depth - k, kLanes);
    for (int64_t n = 0; n < kPanelColumns; n += kLanes) {
      __m256 r[kLanes];
      for (int64_t i = 0; i < kLanes; ++i)
        r[i] = n + i < columns ? _mm256_maskload_ps(source + (n + i) * stride + k, columns_of_k)
                               : _mm256_setzero_ps();
      transpose_8x8(r);
      for (int64_t i = 0; i < count; ++i) _mm256_store_ps(panel + (k + i) * kPanelColumns + n, r[i]);
    }
  }
}

void pack_transposed_block(float* block, const float* source, int64_t stride, int64_t rows, int64_t depth) {
  for (int64_t k = 0; k < depth; ++k)
    for (int64_t i = 0; i < kBlockRows; ++i)
      block[k * kBlockRows + i] = i < rows ? source[k * stride + i] : 0;
}

void multiply_block(float* c, int64_t c_stride, bool accumulate, const float* a, int64_t a_stride,
                    bool turned, const float* b, int64_t b_stride, int64_t rows, int64_t columns,
                    int64_t depth, const Upcoming& read) {
  constexpr int64_t kColumns = 2 * kLanes;
  UpcomingLines upcoming(read, kBlockRows, (depth + kStep - 1) / kStep);
  for (int64_t n = 0; n < columns; n += kColumns) {
    const int64_t some = least(kColumns, columns - n);
    const auto call = some == kColumns ? (turned ? multiply<true, true> : multiply<true, false>)
                                       : (turned ? multiply<false, true> : multiply<false, false>);
    for (int64_t i = 0; i < rows; i += kRowsPerStep)
      call(c + i * c_stride + n, c_stride, accumulate, a + i * (turned ? 1 : a_stride), a_stride, b + n,
           b_stride, least(kRowsPerStep, rows - i), some, depth, upcoming);
  }
}

void store_block_turned(float* c, int64_t c_stride, const float* block, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; i += kLanes) {
    const __m256i mask = first(rows - i);
    for (int64_t n = 0; n < columns; n += kLanes) {
      __m256 r[kLanes];
      for (int64_t j = 0; j < kLanes; ++j)
        r[j] = i + j < rows ? _mm256_load_ps(block + (i + j) * kPanelColumns + n) : _mm256_setzero_ps();
      transpose_8x8(r);
      for (int64_t j = 0; j < kLanes && n + j < columns; ++j)
        _mm256_maskstore_ps(c + (n + j) * c_stride + i, mask, r[j]);
    }
  }
}

}  // namespace bough::avx2
