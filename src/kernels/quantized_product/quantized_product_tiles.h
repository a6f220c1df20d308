// Blocks of 8-bit weights as matrix_product_tiles.h takes a block of rows of A: widened on the way, in the
// nearest caches. The files that implement this include neither torch nor the standard library's templates
// (see common/isa.h).
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

namespace avx512 {
// Widens up to 12 rows of `depth` columns: block[i][k] = weights[i * stride + k], rows of the block `depth`
// apart, further ones zeros. Meanwhile the rows 12 further on are brought near where `rows_follow`.
void widen_block(float* block, const int8_t* weights, int64_t stride, int64_t rows, int64_t depth,
                 bool rows_follow);
}  // namespace avx512

namespace bf16 {
// Widens up to 32 rows to a packed block, padded with zeros to 32 and to a multiple of 32 of the depth; rows
// that follow are brought near. Its elements are kWidenedUnit times the weights, which spares shifts.
constexpr float kWidenedUnit = 65536;
void widen_block(BFloat16Bits* block, const int8_t* weights, int64_t stride, int64_t rows, int64_t depth,
                 bool rows_follow);
// block[i][j] = block[i][j] * scale[i] + bias[i], of 32 x 32 sums; bias may be null.
void scale_sums(float* block, const float* scale, const BFloat16Bits* bias, int64_t rows);
}  // namespace bf16

namespace amx {
// sums[32][32] = weights · panel of up to 32 columns, the weights widened some steps ahead of the products
// that read them: both run at once. The bits are the same as of widen_block and multiply_block. ring: scratch
// of kRingElements.
constexpr int64_t kRingElements = 8 << 10;
void multiply_widened(float* sums, const int8_t* weights, int64_t stride, int64_t rows, int64_t depth,
                      const BFloat16Bits* panel, int64_t columns, bool rows_follow, BFloat16Bits* ring);
}  // namespace amx

}  // namespace bough
