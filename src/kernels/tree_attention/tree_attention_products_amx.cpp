#include "kernels/tree_attention/tree_attention_products.h"

#include <immintrin.h>

#include "kernels/matrix_product/amx_sums.h"
#include "kernels/tree_attention/tree_attention_softmax_bf16.h"

namespace bough::amx {

namespace {
using bf16::kScoreStride;
constexpr int64_t kHalf = kUnitElements / 2;  // scores of 16 queries

const char* bytes(const BFloat16Bits* factor) {
  return reinterpret_cast<const char*>(factor);
}
}  // namespace

void multiply_keys(float* scores, const BFloat16Bits* const* k, int64_t count, const BFloat16Bits* q,
                   int64_t depth) {
  const char* b = bytes(q);
  if (depth == 2 * kUnit) {
    // All queries stay in tiles 4 to 7. Each tile of keys is read once.
    _tile_loadd(4, b, kTileStride);
    _tile_loadd(5, b + kTileBytes, kTileStride);
    _tile_loadd(6, b + 2 * kTileBytes, kTileStride);
    _tile_loadd(7, b + 3 * kTileBytes, kTileStride);
    for (int64_t u = 0; u < count; ++u)
      for (int64_t half = 0; half < 2; ++half) {
        const char* a = bytes(k[u]) + half * kTileBytes;
        _tile_zero(0);
        _tile_zero(1);
        _tile_stream_loadd(2, a, kTileStride);
        _tile_dpbf16ps(0, 2, 4);
        _tile_dpbf16ps(1, 2, 5);
        _tile_stream_loadd(3, a + 2 * kTileBytes, kTileStride);
        _tile_dpbf16ps(0, 3, 6);
        _tile_dpbf16ps(1, 3, 7);
        float* to = scores + u * kScoreStride + half * kHalf / 2;
        _tile_stored(0, to, kTileStride);
        _tile_stored(1, to + kHalf, kTileStride);
      }
    return;
  }
  for (int64_t u = 0; u < count; ++u) {
    load_sums(nullptr, 0, false);
    const char* a = bytes(k[u]);
    for (int64_t d = 0; d < depth / kUnit * 2 * kTileBytes; d += 2 * kTileBytes) {
      _tile_loadd(4, a + d, kTileStride);
      _tile_loadd(6, b + d, kTileStride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + d + kTileBytes, kTileStride);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + d + kTileBytes, kTileStride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    float* to = scores + u * kScoreStride;
    _tile_stored(0, to, kTileStride);
    _tile_stored(1, to + kHalf, kTileStride);
    _tile_stored(2, to + kHalf / 2, kTileStride);
    _tile_stored(3, to + kHalf / 2 + kHalf, kTileStride);
  }
}

void add_values(float* o, bool accumulate, const BFloat16Bits* const* v, const float* p, int64_t count,
                int64_t width) {
  for (int64_t d = 0; d < width; d += kUnit) {
    load_sums(o + d * kUnit, kUnit, accumulate);
    for (int64_t u = 0; u < count; ++u) {
      const char* a = bytes(v[u] + d * kUnit);
      const float* b = p + u * kScoreStride;
      _tile_loadd(6, b, 2 * kTileStride);
      _tile_stream_loadd(4, a, kTileStride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + kHalf, 2 * kTileStride);
      _tile_dpbf16ps(1, 4, 7);
      _tile_stream_loadd(5, a + kTileBytes, kTileStride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    store_sums(o + d * kUnit, kUnit);
  }
}

}  // namespace bough::amx
