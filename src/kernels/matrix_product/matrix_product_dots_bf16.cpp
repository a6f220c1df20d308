// bf16 products by the AVX512-BF16 dot products of pairs.
#include "kernels/matrix_product/bf16_products.h"
#include "kernels/matrix_product/dot_products.h"
#include "kernels/matrix_product/upcoming_lines.h"

namespace bough::dots {

void multiply_block(float* c, int64_t c_stride, bool accumulate, const BFloat16Bits* a, int64_t a_stride,
                    bool packed, const BFloat16Bits* panel, int64_t columns, int64_t depth,
                    const Upcoming& written, const Upcoming& read) {
  const Layout layout{packed ? kTileStride : a_stride * 2};
  const int64_t a_step = packed ? 2 * kTileBytes : kTileStride;
  const auto* a_bytes = reinterpret_cast<const char*>(a);
  const auto* b_bytes = reinterpret_cast<const char*>(panel);
  const int64_t steps = (depth + bf16::kDepth - 1) / bf16::kDepth;
  constexpr int64_t kPasses = (bf16::kBlockRows + kRowsTogether - 1) / kRowsTogether;
  UpcomingLines to_write(written, bf16::kBlockRows, kPasses * steps);
  UpcomingLines to_read(read, bf16::kBlockRows, kPasses * steps);
  const auto step = [&](int64_t i, const char*& a_i, const char*& b_i) {
    to_write.write_soon();
    to_read.read_soon();
    a_i = a_bytes + i * a_step;
    b_i = b_bytes + i * 2 * kTileBytes;
  };
  const Sums sums{c, c_stride, 16, accumulate};
  columns > 16 ? dot_block<2>(sums, layout, steps, step) : dot_block<1>(sums, layout, steps, step);
}

void add_products(float* c, int64_t c_stride, const BFloat16Bits* const* a, const BFloat16Bits* const* b,
                  int64_t count, int64_t rows) {
  const auto step = [&](int64_t i, const char*& a_i, const char*& b_i) {
    a_i = reinterpret_cast<const char*>(a[i]);
    b_i = reinterpret_cast<const char*>(b[i]);
  };
  const Sums sums{c, c_stride, 16, true};
  rows > 16 ? dot_block(sums, {}, count, step) : dot_half_block(sums, {}, count, step);
}

}  // namespace bough::dots
