// Widens 8-bit weights to packed blocks of bf16, alone (namespace bf16) or while AMX tiles multiply
// (namespace amx). This file is compiled for AMX, but the functions of namespace bf16 also run on CPUs
// without AMX, because a compiler emits no AMX instructions by itself.
#include <immintrin.h>

#include "kernels/matrix_product/amx_sums.h"
#include "kernels/matrix_product/matrix_product_tiles.h"
#include "kernels/quantized_product/quantized_product_tiles.h"

namespace bough {

namespace {
constexpr int64_t kLine = 64;         // bytes
constexpr int64_t kBlockStep = 1024;  // elements of a packed block for each kDepth of its depth

// Converts 32 int8 to 32 bf16, which are exactly kWidenedUnit times the int8. Each int8 is moved to the upper
// half of a dword and converted to fp32. The lower half of this fp32 is zero, so its upper half is the bf16.
inline __m512i widen(__m256i weights) {
  const __m512i words = _mm512_cvtepi8_epi16(weights);
  const __m512 even = _mm512_cvtepi32_ps(_mm512_slli_epi32(words, 16));
  const __m512 odd =
      _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
}

inline __mmask32 first(int64_t count) {
  return count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
}
}  // namespace

namespace bf16 {

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

}  // namespace bf16

namespace amx {

namespace {
using bf16::kBlockRows;
using bf16::kDepth;
}  // namespace

void multiply_widened(float* sums, const int8_t* weights, int64_t stride, int64_t rows, int64_t depth,
                      const BFloat16Bits* panel, int64_t columns, bool rows_follow, BFloat16Bits* ring) {
  constexpr int64_t kSlots = kRingElements / kBlockStep, kAhead = kSlots / 2;
  for (int64_t i = 0; rows < kBlockRows && i < kRingElements; i += kDepth)
    _mm512_store_si512(ring + i, _mm512_setzero_si512());
  load_sums(sums, kPanelColumns, false);
  const int64_t steps = (depth + kDepth - 1) / kDepth;
  for (int64_t step = 0; step < steps + kAhead; ++step) {
    if (step < steps) {
      const int64_t k = step * kDepth;
      BFloat16Bits* out = ring + step % kSlots * kBlockStep;
      const int8_t* row = weights + k;
      const __mmask32 mask = first(depth - k);
      for (int64_t i = 0; i < rows; ++i, row += stride, out += kDepth) {
        if (rows_follow && step % 2 == 0) _mm_prefetch(row + kBlockRows * stride, _MM_HINT_T0);
        _mm512_store_si512(out, widen(_mm256_maskz_loadu_epi8(mask, row)));
      }
    }
    asm volatile("" ::: "memory");  // tile loads read the stored data
    const int64_t done = step - kAhead;
    if (done < 0) continue;
    const auto* a = reinterpret_cast<const char*>(ring + done % kSlots * kBlockStep);
    const auto* b = reinterpret_cast<const char*>(panel + done * kDepth * kPanelColumns);
    _tile_loadd(6, b, kTileStride);
    _tile_loadd(4, a, kTileStride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, a + kTileBytes, kTileStride);
    _tile_dpbf16ps(2, 5, 6);
    if (columns <= 16) continue;
    _tile_loadd(7, b + kTileBytes, kTileStride);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  store_sums(sums, kPanelColumns);
}

}  // namespace amx

}  // namespace bough
