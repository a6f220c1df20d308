#include "kernels/tree_attention/tree_attention_products.h"

#include <immintrin.h>

#include "kernels/tree_attention/tree_attention_amx_softmax.h"

namespace bough::amx {

namespace {
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kLine = 64;
constexpr int64_t kHalf = kUnitElements / 2;  // scores of 16 queries

const char* bytes(const BFloat16Bits* factor) {
  return reinterpret_cast<const char*>(factor);
}
}  // namespace

void multiply_keys(float* scores, const BFloat16Bits* const* k, int64_t count, const BFloat16Bits* q,
                   int64_t depth) {
  const char* b = bytes(q);
  if (depth == 2 * kUnit) {
    // All queries stay in tiles 4 to 7, and each tile of keys is read once.
    _tile_loadd(4, b, kLine);
    _tile_loadd(5, b + kTileBytes, kLine);
    _tile_loadd(6, b + 2 * kTileBytes, kLine);
    _tile_loadd(7, b + 3 * kTileBytes, kLine);
    for (int64_t u = 0; u < count; ++u)
      for (int64_t half = 0; half < 2; ++half) {
        const char* a = bytes(k[u]) + half * kTileBytes;
        _tile_zero(0);
        _tile_zero(1);
        _tile_stream_loadd(2, a, kLine);
        _tile_dpbf16ps(0, 2, 4);
        _tile_dpbf16ps(1, 2, 5);
        _tile_stream_loadd(3, a + 2 * kTileBytes, kLine);
        _tile_dpbf16ps(0, 3, 6);
        _tile_dpbf16ps(1, 3, 7);
        float* to = scores + u * kScoreStride + half * kHalf / 2;
        _tile_stored(0, to, kLine);
        _tile_stored(1, to + kHalf, kLine);
      }
    return;
  }
  for (int64_t u = 0; u < count; ++u) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const char* a = bytes(k[u]);
    for (int64_t d = 0; d < depth / kUnit * 2 * kTileBytes; d += 2 * kTileBytes) {
      _tile_loadd(4, a + d, kLine);
      _tile_loadd(6, b + d, kLine);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + d + kTileBytes, kLine);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + d + kTileBytes, kLine);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    float* to = scores + u * kScoreStride;
    _tile_stored(0, to, kLine);
    _tile_stored(1, to + kHalf, kLine);
    _tile_stored(2, to + kHalf / 2, kLine);
    _tile_stored(3, to + kHalf / 2 + kHalf, kLine);
  }
}

void add_values(float* o, bool accumulate, const BFloat16Bits* const* v, const float* p, int64_t count,
                int64_t width) {
  constexpr int64_t kRow = kUnit * sizeof(float);
  for (int64_t d = 0; d < width; d += kUnit) {
    auto* low = reinterpret_cast<char*>(o + d * kUnit);
    char* high = low + 16 * kRow;
    if (accumulate) {
      _tile_loadd(0, low, kRow);
      _tile_loadd(1, low + kLine, kRow);
      _tile_loadd(2, high, kRow);
      _tile_loadd(3, high + kLine, kRow);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t u = 0; u < count; ++u) {
      const char* a = bytes(v[u] + d * kUnit);
      const float* b = p + u * kScoreStride;
      _tile_loadd(6, b, 2 * kLine);
      _tile_stream_loadd(4, a, kLine);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + kHalf, 2 * kLine);
      _tile_dpbf16ps(1, 4, 7);
      _tile_stream_loadd(5, a + kTileBytes, kLine);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, low, kRow);
    _tile_stored(1, low + kLine, kRow);
    _tile_stored(2, high, kRow);
    _tile_stored(3, high + kLine, kRow);
  }
}

}  // namespace bough::amx
