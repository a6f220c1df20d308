// int8 to packed blocks of bf16.
#include <immintrin.h>

#include "kernels/matrix_product/matrix_product_tiles.h"
#include "kernels/quantized_product/quantized_product_tiles.h"
#include "kernels/quantized_product/widen_avx512.h"

namespace bough::bf16 {

namespace {
constexpr int64_t kLine = 64;         // bytes
constexpr int64_t kBlockStep = 1024;  // elements of a packed block for each kDepth
}  // namespace

void widen_block(BFloat16Bits* block, const int8_t* weights, int64_t stride, int64_t rows, int64_t depth,
                 bool rows_follow) {
  const int64_t whole = depth / kLine * kLine;
  for (int64_t i = 0; i < rows; ++i) {
    const int8_t* row = weights + i * stride;
    BFloat16Bits* out = block + i * kDepth;
    int64_t k = 0;
    for (; k < whole; k += kLine, out += 2 * kBlockStep) {
      if (rows_follow) _mm_prefetch(row + kBlockRows * stride + k, _MM_HINT_T1);
      _mm512_store_si512(out, widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k))));
      _mm512_store_si512(out + kBlockStep,
                         widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k + kDepth))));
    }
    for (; k < depth; k += kDepth, out += kBlockStep)
      _mm512_store_si512(out, widen(_mm256_maskz_loadu_epi8(first(depth - k), row + k)));
  }
  for (int64_t i = rows; i < kBlockRows; ++i)
    for (int64_t k = 0; k < depth; k += kDepth)
      _mm512_store_si512(block + k / kDepth * kBlockStep + i * kDepth, _mm512_setzero_si512());
}

void scale_sums(float* block, const float* scale, const BFloat16Bits* bias, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    const __m512 factor = _mm512_set1_ps(scale[i] / kWidenedUnit);
    const __m512 added =
        bias ? _mm512_castsi512_ps(_mm512_set1_epi32(bias[i].bits << 16)) : _mm512_setzero_ps();
    for (float* sums = block + i * kPanelColumns; sums < block + (i + 1) * kPanelColumns; sums += 16)
      _mm512_store_ps(sums, _mm512_fmadd_ps(_mm512_load_ps(sums), factor, added));
  }
}

}  // namespace bough::bf16
