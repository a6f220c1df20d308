// The two ways to multiply blocks of bf16 (matrix_product_tiles.h): AMX tiles if has_amx(), else the
// AVX512-BF16 dot products of pairs. Both read the same packed factors and sum in fp32, in ascending k (inner
// index).
#pragma once

#include "kernels/common/isa.h"
#include "kernels/matrix_product/matrix_product_tiles.h"

namespace bough {

namespace amx {
void begin_tiles();
void end_tiles();
void multiply_block(float* c, int64_t c_stride, bool accumulate, const BFloat16Bits* a, int64_t a_stride,
                    bool packed, const BFloat16Bits* panel, int64_t columns, int64_t depth,
                    const Upcoming& written, const Upcoming& read);
void add_products(float* c, int64_t c_stride, const BFloat16Bits* const* a, const BFloat16Bits* const* b,
                  int64_t count, int64_t rows);
}  // namespace amx

namespace dots {
void multiply_block(float* c, int64_t c_stride, bool accumulate, const BFloat16Bits* a, int64_t a_stride,
                    bool packed, const BFloat16Bits* panel, int64_t columns, int64_t depth,
                    const Upcoming& written, const Upcoming& read);
void add_products(float* c, int64_t c_stride, const BFloat16Bits* const* a, const BFloat16Bits* const* b,
                  int64_t count, int64_t rows);

// y[r][n] = x[r]·weight[n] (+ bias[n]) (+ residual[r][n]), rounded once, for 1 to kMostRows rows of x and any
// inner dimension. The order of the sums is not that of multiply_block, so batch_invariant_product must not
// use it.
struct FewRows {
  static constexpr int64_t kMostRows = 4;
  int64_t rows, depth;
  const BFloat16Bits *x, *weight;
  int64_t x_stride, weight_stride;
  BFloat16Bits* y;
  int64_t y_stride;                     // also of residual
  const BFloat16Bits *bias, *residual;  // or nullptr
};
// Computes columns [begin, end) of y.
void multiply_few_rows(const FewRows& product, int64_t begin, int64_t end);
}  // namespace dots

}  // namespace bough
