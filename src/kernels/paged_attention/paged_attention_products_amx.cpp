#include <immintrin.h>

#include "kernels/paged_attention/paged_attention_products.h"

namespace bough::amx {

namespace {
using Element = BFloat16Bits;
constexpr int64_t kRows = kEntriesTogether, kPage = kPageTokens;
constexpr int64_t kDepth = 32;        // inner dimension of a tile of queries or keys
constexpr int64_t kLineBytes = 64;    // a tile's row: 16 sums, 32 elements, or 16 pairs
constexpr int64_t kWeightBytes = 32;  // a row of weights: 16 elements

template <int kLines>
inline void bring_near(const Element* tile, int64_t stride) {
  for (int i = 0; i < kLines; ++i)
    _mm_prefetch(reinterpret_cast<const char*>(tile) + i * stride, _MM_HINT_T1);
}

// Multiplies the queries with the keys of up to 4 pages.
void multiply_four(float* scores, const Element* q, int64_t padded_H, const PageFactors& k) {
  const int64_t q_stride = padded_H * static_cast<int64_t>(sizeof(Element));
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t h = 0; h < padded_H; h += kDepth) {
    _tile_loadd(4, q + h, q_stride);
    const int64_t at = h * kPage;
    _tile_loadd(5, k.pages[0] + at, kLineBytes);
    _tile_dpbf16ps(0, 4, 5);
    bring_near<16>(k.ahead[0] + at, kLineBytes);
    if (k.count > 1) {
      _tile_loadd(5, k.pages[1] + at, kLineBytes);
      _tile_dpbf16ps(1, 4, 5);
      bring_near<16>(k.ahead[1] + at, kLineBytes);
    }
    if (k.count > 2) {
      _tile_loadd(5, k.pages[2] + at, kLineBytes);
      _tile_dpbf16ps(2, 4, 5);
      bring_near<16>(k.ahead[2] + at, kLineBytes);
    }
    if (k.count > 3) {
      _tile_loadd(5, k.pages[3] + at, kLineBytes);
      _tile_dpbf16ps(3, 4, 5);
      bring_near<16>(k.ahead[3] + at, kLineBytes);
    }
  }
  constexpr int64_t kTile = kRows * kPage;
  _tile_stored(0, scores, kLineBytes);
  if (k.count > 1) _tile_stored(1, scores + kTile, kLineBytes);
  if (k.count > 2) _tile_stored(2, scores + 2 * kTile, kLineBytes);
  if (k.count > 3) _tile_stored(3, scores + 3 * kTile, kLineBytes);
}

template <int kTiles>
void add_columns(float* o, int64_t padded_H, const Element* weights, const PageFactors& v, int64_t column) {
  const int64_t o_stride = padded_H * static_cast<int64_t>(sizeof(float));
  const int64_t v_stride = padded_H * 2 * static_cast<int64_t>(sizeof(Element));
  o += column;
  _tile_loadd(0, o, o_stride);
  _tile_loadd(1, o + 16, o_stride);
  if constexpr (kTiles > 2) {
    _tile_loadd(2, o + 32, o_stride);
    _tile_loadd(3, o + 48, o_stride);
  }
  for (int64_t i = 0; i < v.count; ++i) {
    const Element* values = v.pages[i] + 2 * column;
    const Element* ahead = v.ahead[i] + 2 * column;
    _tile_loadd(6, weights + i * kRows * kPage, kWeightBytes);
    _tile_loadd(7, values, v_stride);
    _tile_dpbf16ps(0, 6, 7);
    bring_near<8>(ahead, v_stride);
    _tile_loadd(7, values + 32, v_stride);
    _tile_dpbf16ps(1, 6, 7);
    bring_near<8>(ahead + 32, v_stride);
    if constexpr (kTiles > 2) {
      _tile_loadd(7, values + 64, v_stride);
      _tile_dpbf16ps(2, 6, 7);
      bring_near<8>(ahead + 64, v_stride);
      _tile_loadd(7, values + 96, v_stride);
      _tile_dpbf16ps(3, 6, 7);
      bring_near<8>(ahead + 96, v_stride);
    }
  }
  _tile_stored(0, o, o_stride);
  _tile_stored(1, o + 16, o_stride);
  if constexpr (kTiles > 2) {
    _tile_stored(2, o + 32, o_stride);
    _tile_stored(3, o + 48, o_stride);
  }
}
}  // namespace

// Tiles 0 to 3 hold sums, tile 4 queries, tile 5 keys, tile 6 weights, tile 7 values.
void begin_rows(int64_t entries) {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  static_assert(sizeof config == 64);
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = tile == 6 ? kWeightBytes : kLineBytes;
    config.rows[tile] = static_cast<uint8_t>(tile == 5 ? kRows : tile == 7 ? kPage / 2 : entries);
  }
  // Makes the compiler store `config`, because it does not know that _tile_loadconfig reads memory.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

void multiply_keys(float* scores, const Element* q, int64_t, int64_t padded_H, const PageFactors& keys) {
  for (int64_t i = 0; i < keys.count; i += 4)
    multiply_four(scores + i * kRows * kPage, q, padded_H,
                  {keys.pages + i, keys.ahead + i, keys.count - i < 4 ? keys.count - i : 4});
}

void add_values(float* o, int64_t, int64_t padded_H, const Element* weights, const PageFactors& values) {
  int64_t column = 0;
  for (; column + 64 <= padded_H; column += 64) add_columns<4>(o, padded_H, weights, values, column);
  if (column < padded_H) add_columns<2>(o, padded_H, weights, values, column);
}

}  // namespace bough::amx
