// The two ways to multiply blocks of bf16 (matrix_product_tiles.h): AMX tiles where has_amx(), else AVX-512's dot products
// of pairs. Both read the same packed factors and sum in fp32, over ascending k.
#pragma once

#include "kernels/common/isa.h"
#include "kernels/matrix_product/matrix_product_tiles.h"

namespace bough {

namespace amx {
void begin_tiles();
void end_tiles();
void multiply_block(float* c, int64_t c_stride, bool accumulate, const BFloat16Bits* a, int64_t a_stride,
                    bool packed, const BFloat16Bits* panel, int64_t depth, const Upcoming& written,
                    const Upcoming& read);
void add_products(float* c, int64_t c_stride, const BFloat16Bits* const* a, const BFloat16Bits* const* b,
                  int64_t count);
}  // namespace amx

namespace dots {
void multiply_block(float* c, int64_t c_stride, bool accumulate, const BFloat16Bits* a, int64_t a_stride,
                    bool packed, const BFloat16Bits* panel, int64_t columns, int64_t depth,
                    const Upcoming& written, const Upcoming& read);
void add_products(float* c, int64_t c_stride, const BFloat16Bits* const* a, const BFloat16Bits* const* b,
                  int64_t count);
}  // namespace dots

}  // namespace bough
