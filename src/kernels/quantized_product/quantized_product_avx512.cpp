// Widens 8-bit weights to blocks of fp32 by AVX-512.
#include <immintrin.h>

#include "kernels/matrix_product/matrix_product_tiles.h"
#include "kernels/quantized_product/quantized_product_tiles.h"

namespace bough::avx512 {

void widen_block(float* block, const int8_t* weights, int64_t stride, int64_t rows, int64_t depth,
                 bool rows_follow) {
  for (int64_t i = 0; i < rows; ++i) {
    const int8_t* row = weights + i * stride;
    float* out = block + i * depth;
    for (int64_t k = 0; k < depth; k += 16) {
      if (rows_follow && k % 64 == 0) _mm_prefetch(row + kBlockRows * stride + k, _MM_HINT_T1);
      const auto mask =
          depth - k >= 16 ? static_cast<__mmask16>(0xFFFF) : static_cast<__mmask16>((1u << (depth - k)) - 1);
      const __m128i bytes = _mm_maskz_loadu_epi8(mask, row + k);
      _mm512_mask_storeu_ps(out + k, mask, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
    }
  }
  for (int64_t i = rows * depth; i < kBlockRows * depth; ++i) block[i] = 0;
}

}  // namespace bough::avx512
