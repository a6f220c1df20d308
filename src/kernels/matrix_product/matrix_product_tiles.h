// The inner products of matrix_product_cpu.cpp, one set per instruction set. Each computes blocks of `rows` x
// 32 of C = A·B from a panel of B in the set's own packed form and from A as it lies in memory or packed:
//
//   fp32: up to 12 x 32, by AVX-512; a packed B is [k][32], a packed A [k][12].
//   bf16: 32 x 32, by AMX tiles or by AVX-512's dot products of pairs (bf16_products.h);
//         a packed B is [k/32][2][16 pairs of k][16][2], a packed A [k/32][2][16 rows][32].
//
// The files that implement them include neither torch nor the standard library's templates (see
// common/isa.h).
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

constexpr int64_t kPanelColumns = 32;

// Memory that is written, or read, after a product: rows of `lines` cache lines, brought near while it runs.
struct Upcoming {
  const void* rows = nullptr;  // as many as a block has, or null
  int64_t stride = 0;          // in bytes
  int64_t lines = 0;
};

namespace avx512 {
constexpr int64_t kBlockRows = 12;

// Packs a panel of `columns` <= 32 columns, padded with zeros. b[k][n] = source[k * stride + n], or source[n
// * stride + k] where transposed.
void pack_panel(float* panel, const float* source, int64_t stride, bool transposed, int64_t depth,
                int64_t columns);
// Packs up to 12 rows of a[m][k] = source[k * stride + m], padded with zeros.
void pack_transposed_block(float* block, const float* source, int64_t stride, int64_t rows, int64_t depth);
// c[rows][columns] = or += a·b, up to 12 x 32. a[i][k] at a[i * a_stride + k], or at a[k * a_stride + i]
// where turned (a packed block: of stride 12); rows of b b_stride apart (a panel's: 32).
void multiply_block(float* c, int64_t c_stride, bool accumulate, const float* a, int64_t a_stride,
                    bool turned, const float* b, int64_t b_stride, int64_t rows, int64_t columns,
                    int64_t depth, const Upcoming& read = {});
// c[j][i] = block[i][j] of up to 12 x 32.
void store_block_turned(float* c, int64_t c_stride, const float* block, int64_t rows, int64_t columns);
}  // namespace avx512

namespace bf16 {
constexpr int64_t kBlockRows = 32;
constexpr int64_t kDepth = 32;  // of one step

// Called before and after the functions below, in each thread: AMX tiles keep 8 KiB of state that context
// switches save.
void begin_tiles();
void end_tiles();

void pack_panel(BFloat16Bits* panel, const BFloat16Bits* source, int64_t stride, bool transposed,
                int64_t depth, int64_t columns);
// Packs up to 32 rows, padded with zeros to 32 and to a multiple of 32 of k. a[m][k] lies as pack_panel's
// b[k][n].
void pack_block(BFloat16Bits* block, const BFloat16Bits* source, int64_t stride, bool transposed,
                int64_t rows, int64_t depth);
// dst[rows_padded][dst_stride]: `rows` rows of `width`, the rest of each and further rows zeros; dst_stride a
// multiple of 32, at least width.
void copy_rows(BFloat16Bits* dst, int64_t dst_stride, const BFloat16Bits* source, int64_t stride,
               int64_t rows, int64_t width, int64_t rows_padded);
// c[32][32] = or += a·b. packed: a is a packed block, else 32 rows of `a_stride`, depth a multiple of 32. Of
// c, what is beyond `columns` is unspecified.
void multiply_block(float* c, int64_t c_stride, bool accumulate, const BFloat16Bits* a, int64_t a_stride,
                    bool packed, const BFloat16Bits* panel, int64_t columns, int64_t depth,
                    const Upcoming& written = {}, const Upcoming& read = {});
// c[32][32] += sum_i a[i]·b[i] of `count` packed blocks of rows and panels, each of depth 32.
void add_products(float* c, int64_t c_stride, const BFloat16Bits* const* a, const BFloat16Bits* const* b,
                  int64_t count);
// c = block (+ residual, of c's stride, or null), rounded to nearest even.
void store_block(BFloat16Bits* c, int64_t c_stride, const float* block, int64_t rows, int64_t columns,
                 const BFloat16Bits* residual = nullptr);
// Stores the transpose: c[j][i] = block[i][j] (+ residual, of c's stride, or null), rounded to nearest even.
void store_block_turned(BFloat16Bits* c, int64_t c_stride, const float* block, int64_t rows, int64_t columns,
                        const BFloat16Bits* residual = nullptr);
}  // namespace bf16

}  // namespace bough
