// Widens blocks of rows of 8-bit weights to the format in which matrix_product_tiles.h reads a block of rows
// of A, so that the widened block stays in the L1 or L2 cache. The files that implement these functions
// include neither torch nor the standard library's templates (common/isa.h).
#pragma once

#include <cstdint>

#include "kernels/common/avx.h"
#include "kernels/common/element_types.h"

// Widens `rows` <= 12 rows of `depth` weights: block[i * depth + k] = weights[i * stride + k]. Rows from
// `rows` to 11 become zeros. If rows_follow, also prefetches the 12 rows that follow.
BOUGH_AVX_DECLARE(void widen_block(float* block, const int8_t* weights, int64_t stride, int64_t rows,
                                   int64_t depth, bool rows_follow))

namespace bough {

namespace bf16 {
// Widens `rows` <= 32 rows to a packed block, padded with zeros to 32 rows and to a depth that is a multiple
// of 32. The elements are kWidenedUnit times the weights, which saves a shift. If rows_follow, also
// prefetches the 32 rows that follow.
constexpr float kWidenedUnit = 65536;
void widen_block(BFloat16Bits* block, const int8_t* weights, int64_t stride, int64_t rows, int64_t depth,
                 bool rows_follow);
// block[i][j] = block[i][j] / kWidenedUnit * scale[i] + bias[i] for i < rows, j < 32. bias may be nullptr.
void scale_sums(float* block, const float* scale, const BFloat16Bits* bias, int64_t rows);
}  // namespace bf16

namespace amx {
// sums[32][32] = weights · panel, for a panel of `columns` <= 32 columns. Widens the weights a few steps
// ahead of the products, so that the CPU does both at once. The result has the same bits as widen_block and
// multiply_block. ring: scratch of kRingElements.
constexpr int64_t kRingElements = 8 << 10;
void multiply_widened(float* sums, const int8_t* weights, int64_t stride, int64_t rows, int64_t depth,
                      const BFloat16Bits* panel, int64_t columns, bool rows_follow, BFloat16Bits* ring);
}  // namespace amx

}  // namespace bough
