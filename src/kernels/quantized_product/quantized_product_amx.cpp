// 8-bit weights widened while AMX tiles multiply.
#include <immintrin.h>

#include "kernels/matrix_product/amx_sums.h"
#include "kernels/matrix_product/matrix_product_tiles.h"
#include "kernels/quantized_product/quantized_product_tiles.h"
#include "kernels/quantized_product/widen_avx512.h"

namespace bough::amx {

namespace {
using bf16::kBlockRows;
using bf16::kDepth;
constexpr int64_t kBlockStep = 1024;  // elements of a packed block for each kDepth
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
    asm volatile("" ::: "memory");  // tile loads read what was stored
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

}  // namespace bough::amx
