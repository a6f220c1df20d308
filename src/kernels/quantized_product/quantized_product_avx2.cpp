// Widens 8-bit weights to blocks of fp32 by AVX2.
#include <immintrin.h>

#include "kernels/matrix_product/matrix_product_tiles.h"
#include "kernels/quantized_product/quantized_product_tiles.h"

namespace bough::avx2 {

void widen_block(float* block, const int8_t* weights, int64_t stride, int64_t rows, int64_t depth,
                 bool rows_follow) {
  for (int64_t i = 0; i < rows; ++i) {
    const int8_t* row = weights + i * stride;
    float* out = block + i * depth;
    int64_t k = 0;
    for (; k + 8 <= depth; k += 8) {
      if (rows_follow && k % 64 == 0) _mm_prefetch(row + kBlockRows * stride + k, _MM_HINT_T1);
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + k));
      _mm256_storeu_ps(out + k, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
    }
    for (; k < depth; ++k) out[k] = row[k];
  }
  for (int64_t i = rows * depth; i < kBlockRows * depth; ++i) block[i] = 0;
}

}  // namespace bough::avx2
