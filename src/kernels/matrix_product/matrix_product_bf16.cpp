// Packs bf16 factors into the layout of matrix_product_tiles.h, and rounds sums to bf16.
#include <immintrin.h>

#include <cstring>

#include "kernels/matrix_product/bf16_layout.h"
#include "kernels/matrix_product/matrix_product_tiles.h"
#include "kernels/matrix_product/transpose_16x16.h"

namespace bough::bf16 {

namespace {
inline __mmask32 first(int64_t count) {
  return count >= 32 ? ~__mmask32{0} : count <= 0 ? 0 : (__mmask32{1} << count) - 1;
}

// Loads 16 matrix rows of 32 bf16 elements: r[i] = source[i * stride .. + 31]. Each dword of r[i] has two
// neighbouring elements. Rows from `rows` on, and columns outside the mask `columns`, are zeros.
inline void load_rows(__m512i r[16], const BFloat16Bits* source, int64_t stride, int64_t rows,
                      __mmask32 columns) {
  for (int64_t i = 0; i < kTileRows; ++i)
    r[i] = i < rows ? _mm512_maskz_loadu_epi16(columns, source + i * stride) : _mm512_setzero_si512();
}

// Loads four 128-bit lanes from matrix rows `step` apart, each with a load. Loading whole rows and shuffling
// between lanes would be slower, because only one CPU port shuffles.
inline __m512i lanes_of_rows(const BFloat16Bits* source, int64_t step) {
  const auto lane = [&](int64_t i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i * step));
  };
  __m512i r = _mm512_castsi128_si512(lane(0));
  r = _mm512_mask_broadcast_i32x4(r, 0x00f0, lane(1));
  r = _mm512_mask_broadcast_i32x4(r, 0x0f00, lane(2));
  return _mm512_mask_broadcast_i32x4(r, 0xf000, lane(3));
}

// Transposes 16 x 16 dwords of two elements: out[i][j] = dword i of source row j. Rows of out: 64 bytes.
inline void transpose_dwords(char* out, const BFloat16Bits* source, int64_t stride) {
  for (int64_t lane = 0; lane < 4; ++lane) {
    __m512i r[4], t[4];
    for (int64_t j = 0; j < 4; ++j) r[j] = lanes_of_rows(source + j * stride + lane * 8, 4 * stride);
    for (int64_t j = 0; j < 2; ++j) {
      t[j] = _mm512_unpacklo_epi32(r[2 * j], r[2 * j + 1]);
      t[2 + j] = _mm512_unpackhi_epi32(r[2 * j], r[2 * j + 1]);
    }
    char* rows = out + lane * 4 * kTileStride;
    for (int64_t i = 0; i < 2; ++i) {
      _mm512_store_si512(rows + 2 * i * kTileStride, _mm512_unpacklo_epi64(t[2 * i], t[2 * i + 1]));
      _mm512_store_si512(rows + (2 * i + 1) * kTileStride, _mm512_unpackhi_epi64(t[2 * i], t[2 * i + 1]));
    }
  }
}

// Transposes 32 x 32 elements: out[i][j] = source[j * stride + i]. The source is first copied, because each
// cache line is read four times, and lines that are far apart may share a set of the L1 cache.
inline void transpose_elements(char* out, const BFloat16Bits* far_source, int64_t far_stride) {
  constexpr int64_t stride = 32;
  alignas(64) BFloat16Bits source[32 * stride];
  for (int64_t i = 0; i < 32; ++i)
    _mm512_store_si512(source + i * stride, _mm512_loadu_si512(far_source + i * far_stride));
  for (int64_t lane = 0; lane < 4; ++lane) {
    __m512i r[8], t[8];
    for (int64_t j = 0; j < 8; ++j) r[j] = lanes_of_rows(source + j * stride + lane * 8, 8 * stride);
    for (int64_t j = 0; j < 4; ++j) {
      t[j] = _mm512_unpacklo_epi16(r[2 * j], r[2 * j + 1]);
      t[4 + j] = _mm512_unpackhi_epi16(r[2 * j], r[2 * j + 1]);
    }
    for (int64_t half = 0; half < 8; half += 4)
      for (int64_t j = 0; j < 2; ++j) {
        r[half + j] = _mm512_unpacklo_epi32(t[half + 2 * j], t[half + 2 * j + 1]);
        r[half + 2 + j] = _mm512_unpackhi_epi32(t[half + 2 * j], t[half + 2 * j + 1]);
      }
    char* rows = out + lane * 8 * kTileStride;
    for (int64_t i = 0; i < 4; ++i) {
      _mm512_store_si512(rows + 2 * i * kTileStride, _mm512_unpacklo_epi64(r[2 * i], r[2 * i + 1]));
      _mm512_store_si512(rows + (2 * i + 1) * kTileStride, _mm512_unpackhi_epi64(r[2 * i], r[2 * i + 1]));
    }
  }
}

// Interleaves two vectors of 32: low has (a0 b0 a1 b1 ... a15 b15), high has (a16 b16 ... a31 b31).
inline void interleave(__m512i a, __m512i b, __m512i& low, __m512i& high) {
  const __m512i first_half = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                              39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i second_half = _mm512_add_epi16(first_half, _mm512_set1_epi16(16));
  low = _mm512_permutex2var_epi16(a, first_half, b);
  high = _mm512_permutex2var_epi16(a, second_half, b);
}
}  // namespace

void pack_panel(BFloat16Bits* panel, const BFloat16Bits* source, int64_t stride, bool transposed,
                int64_t depth, int64_t columns) {
  auto* out = reinterpret_cast<char*>(panel);
  for (int64_t k = 0; k < depth; k += kDepth, out += 2 * kTileBytes) {
    const int64_t left = depth - k;
    if (transposed) {
      for (int64_t half = 0; half < 2; ++half) {
        const BFloat16Bits* rows = source + half * 16 * stride + k;
        if (left >= kDepth && columns >= (half + 1) * 16) {
          transpose_dwords(out + half * kTileBytes, rows, stride);
          continue;
        }
        __m512i r[16];
        load_rows(r, rows, stride, columns - half * 16, first(left));
        transpose_16x16(r);
        for (int i = 0; i < 16; ++i) _mm512_store_si512(out + half * kTileBytes + i * kTileStride, r[i]);
      }
    } else {
      const BFloat16Bits* rows = source + k * stride;
      for (int64_t pair = 0; pair < 16; ++pair) {
        const __m512i zero = _mm512_setzero_si512();
        const __m512i even =
            2 * pair < left ? _mm512_maskz_loadu_epi16(first(columns), rows + 2 * pair * stride) : zero;
        const __m512i odd = 2 * pair + 1 < left
                                ? _mm512_maskz_loadu_epi16(first(columns), rows + (2 * pair + 1) * stride)
                                : zero;
        __m512i low, high;
        interleave(even, odd, low, high);
        _mm512_store_si512(out + pair * kTileStride, low);
        _mm512_store_si512(out + kTileBytes + pair * kTileStride, high);
      }
    }
  }
}

void pack_block(BFloat16Bits* block, const BFloat16Bits* source, int64_t stride, bool transposed,
                int64_t rows, int64_t depth) {
  auto* out = reinterpret_cast<char*>(block);
  for (int64_t k = 0; k < depth; k += kDepth, out += 2 * kTileBytes) {
    const int64_t left = depth - k;
    if (!transposed) {
      for (int64_t i = 0; i < kBlockRows; ++i)
        _mm512_store_si512(out + i * kTileStride,
                           i < rows ? _mm512_maskz_loadu_epi16(first(left), source + i * stride + k)
                                    : _mm512_setzero_si512());
      continue;
    }
    if (left >= kDepth && rows >= kBlockRows) {
      transpose_elements(out, source + k * stride, stride);
      continue;
    }
    __m512i low[16], high[16];
    for (int64_t pair = 0; pair < 16; ++pair) {
      const BFloat16Bits* at = source + (k + 2 * pair) * stride;
      const __m512i zero = _mm512_setzero_si512();
      const __m512i even = 2 * pair < left ? _mm512_maskz_loadu_epi16(first(rows), at) : zero;
      const __m512i odd = 2 * pair + 1 < left ? _mm512_maskz_loadu_epi16(first(rows), at + stride) : zero;
      interleave(even, odd, low[pair], high[pair]);
    }
    transpose_16x16(low);
    transpose_16x16(high);
    for (int i = 0; i < 16; ++i) {
      _mm512_store_si512(out + i * kTileStride, low[i]);
      _mm512_store_si512(out + kTileBytes + i * kTileStride, high[i]);
    }
  }
}

void copy_rows(BFloat16Bits* dst, int64_t dst_stride, const BFloat16Bits* source, int64_t stride,
               int64_t rows, int64_t width, int64_t rows_padded) {
  for (int64_t i = 0; i < rows_padded; ++i)
    for (int64_t column = 0; column < dst_stride; column += 32) {
      const int64_t left = i < rows && width > column ? width - column : 0;
      _mm512_store_si512(dst + i * dst_stride + column,
                         _mm512_maskz_loadu_epi16(first(left), source + i * stride + column));
    }
}

// Adds residual[0..31], unless it is nullptr, to low (elements 0 to 15) and high (16 to 31), rounds the sums
// and stores them to c[0..31]. `columns` masks both reads and writes.
inline void store_row(BFloat16Bits* c, __m512 low, __m512 high, __mmask32 columns,
                      const BFloat16Bits* residual) {
  if (residual) {
    const __m512i r = _mm512_maskz_loadu_epi16(columns, residual);
    const auto widen = [](__m256i half) {
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    };
    low = _mm512_add_ps(low, widen(_mm512_castsi512_si256(r)));
    high = _mm512_add_ps(high, widen(_mm512_extracti64x4_epi64(r, 1)));
  }
  _mm512_mask_storeu_epi16(c, columns, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
}

void store_block(BFloat16Bits* c, int64_t c_stride, const float* block, int64_t rows, int64_t columns,
                 const BFloat16Bits* residual) {
  for (int64_t i = 0; i < rows; ++i)
    store_row(c + i * c_stride, _mm512_load_ps(block + i * kPanelColumns),
              _mm512_load_ps(block + i * kPanelColumns + 16), first(columns),
              residual ? residual + i * c_stride : nullptr);
}

void store_block_turned(BFloat16Bits* c, int64_t c_stride, const float* block, int64_t rows, int64_t columns,
                        const BFloat16Bits* residual) {
  for (int64_t half = 0; half < columns; half += 16) {
    __m512i low[16], high[16];
    for (int64_t i = 0; i < 16; ++i) {
      low[i] = _mm512_load_si512(block + i * kPanelColumns + half);
      high[i] = _mm512_load_si512(block + (16 + i) * kPanelColumns + half);
    }
    transpose_16x16(low);
    transpose_16x16(high);
    for (int64_t j = 0; j < 16 && half + j < columns; ++j)
      store_row(c + (half + j) * c_stride, _mm512_castsi512_ps(low[j]), _mm512_castsi512_ps(high[j]),
                first(rows), residual ? residual + (half + j) * c_stride : nullptr);
  }
}

}  // namespace bough::bf16
