// The inner kernels of matrix_product_cpu.cpp, one namespace per instruction set. k is the inner index; its
// range is the depth. Each kernel computes a block of `rows` x 32 elements of C = A·B from a packed panel (32
// columns) of B and from rows of A, in place or packed:
//
//   fp32: up to 12 x 32, by AVX-512 or AVX2; a packed B is [k][32], a packed A [k][12].
//   bf16: 32 x 32, by AMX tiles or by AVX-512's dot products of pairs (bf16_products.h);
//         a packed B is [k/32][2][16 pairs of k][16][2], a packed A [k/32][2][16 rows][32].
//
// The files that implement these kernels include neither torch nor the standard library's templates
// (common/isa.h).
#pragma once

#include <cstdint>

#include "kernels/common/avx.h"
#include "kernels/common/element_types.h"

namespace bough {

constexpr int64_t kPanelColumns = 32;

// Memory to prefetch during a product for a later one: `lines` cache lines of each row of a block.
struct Upcoming {
  const void* rows = nullptr;  // the first of a block's rows; nullptr: nothing to prefetch
  int64_t stride = 0;          // in bytes
  int64_t lines = 0;
};

constexpr int64_t kBlockRows = 12;  // of an fp32 block
}  // namespace bough

// Packs a panel of `columns` <= 32 columns of b, padded with zeros to 32. b[k][n] is source[k * stride + n],
// or source[n * stride + k] if transposed.
BOUGH_AVX_DECLARE(void pack_panel(float* panel, const float* source, int64_t stride, bool transposed,
                                  int64_t depth, int64_t columns))
// Packs `rows` <= 12 rows of a[m][k] = source[k * stride + m], padded with zeros to 12.
BOUGH_AVX_DECLARE(void pack_transposed_block(float* block, const float* source, int64_t stride, int64_t rows,
                                             int64_t depth))
// c[rows][columns] = or += a·b, up to 12 x 32. a[i][k] is at a[i * a_stride + k], or at a[k * a_stride + i]
// if turned (a packed block has a_stride 12). Rows of b are b_stride apart (in a panel: 32).
BOUGH_AVX_DECLARE(void multiply_block(float* c, int64_t c_stride, bool accumulate, const float* a,
                                      int64_t a_stride, bool turned, const float* b, int64_t b_stride,
                                      int64_t rows, int64_t columns, int64_t depth, const Upcoming& read))
// c[j][i] = block[i][j], for up to 12 x 32 elements.
BOUGH_AVX_DECLARE(void store_block_turned(float* c, int64_t c_stride, const float* block, int64_t rows,
                                          int64_t columns))

namespace bough {

namespace bf16 {
constexpr int64_t kBlockRows = 32;
constexpr int64_t kDepth = 32;  // depth of one step

// Every thread must call begin_tiles() before and end_tiles() after it calls the functions below.
// begin_tiles() configures the AMX tiles; end_tiles() releases these 8 KiB of registers, which context
// switches would otherwise save. Without AMX both do nothing.
void begin_tiles();
void end_tiles();

// Packs a panel as the fp32 function does, also padded with zeros to a depth that is a multiple of 32.
void pack_panel(BFloat16Bits* panel, const BFloat16Bits* source, int64_t stride, bool transposed,
                int64_t depth, int64_t columns);
// Packs up to 32 rows of a, padded with zeros to 32 rows and to a depth that is a multiple of 32. a[m][k] is
// source[m * stride + k], or source[k * stride + m] if transposed.
void pack_block(BFloat16Bits* block, const BFloat16Bits* source, int64_t stride, bool transposed,
                int64_t rows, int64_t depth);
// Copies `rows` rows of `width` elements to dst[rows_padded][dst_stride]. All other elements of dst become
// zeros. dst_stride is a multiple of 32 and at least width.
void copy_rows(BFloat16Bits* dst, int64_t dst_stride, const BFloat16Bits* source, int64_t stride,
               int64_t rows, int64_t width, int64_t rows_padded);
// c[32][32] = or += a·b. a is a packed block if `packed`, else 32 rows a_stride apart. If not packed, the
// depth must be a multiple of 32. Columns of c from `columns` on are unspecified; if columns <= 16, columns
// from 16 on are neither read nor written.
void multiply_block(float* c, int64_t c_stride, bool accumulate, const BFloat16Bits* a, int64_t a_stride,
                    bool packed, const BFloat16Bits* panel, int64_t columns, int64_t depth,
                    const Upcoming& written = {}, const Upcoming& read = {});
// c[rows][32] += sum_i a[i]·b[i], for `count` packed blocks of rows and packed panels, each of depth 32. rows
// is 32 or 16. For 16 rows, only the first half of a packed block is read.
void add_products(float* c, int64_t c_stride, const BFloat16Bits* const* a, const BFloat16Bits* const* b,
                  int64_t count, int64_t rows = kBlockRows);
// c[rows][columns] = block (+ residual, with c's stride, unless nullptr), rounded to nearest even.
void store_block(BFloat16Bits* c, int64_t c_stride, const float* block, int64_t rows, int64_t columns,
                 const BFloat16Bits* residual = nullptr);
// Stores the transpose: c[j][i] = block[i][j] for i < rows, j < columns. Otherwise like store_block().
void store_block_turned(BFloat16Bits* c, int64_t c_stride, const float* block, int64_t rows, int64_t columns,
                        const BFloat16Bits* residual = nullptr);
}  // namespace bf16

}  // namespace bough
