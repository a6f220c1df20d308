// Loads and stores a 32 x 32 matrix of fp32 sums in four AMX tiles. All AMX tiles must be configured at full
// size (amx::begin_tiles). Only files compiled for AMX include this.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/matrix_product/bf16_layout.h"

namespace bough::amx {

using bf16::kTileBytes;
using bf16::kTileRows;
using bf16::kTileStride;

// Rows and columns of the sums: 32 or 16. Tiles of other rows and columns are not used.
constexpr int64_t kBothTiles = 2 * kTileRows;

// Sets tiles 0 and 1 (rows 0 to 15), 2 and 3 (rows 16 to 31) to c if `accumulate`, else to zeros.
template <int64_t kRows = kBothTiles, int64_t kColumns = kBothTiles>
static inline void load_sums(const float* c, int64_t c_stride, bool accumulate) {
  if (!accumulate) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  const int64_t stride = c_stride * 4;
  const auto* low = reinterpret_cast<const char*>(c);
  const char* high = low + kTileRows * stride;
  _tile_loadd(0, low, stride);
  if (kColumns > kTileRows) _tile_loadd(1, low + kTileStride, stride);
  if (kRows > kTileRows) _tile_loadd(2, high, stride);
  if (kRows > kTileRows && kColumns > kTileRows) _tile_loadd(3, high + kTileStride, stride);
}

template <int64_t kRows = kBothTiles, int64_t kColumns = kBothTiles>
static inline void store_sums(float* c, int64_t c_stride) {
  const int64_t stride = c_stride * 4;
  auto* low = reinterpret_cast<char*>(c);
  char* high = low + kTileRows * stride;
  _tile_stored(0, low, stride);
  if (kColumns > kTileRows) _tile_stored(1, low + kTileStride, stride);
  if (kRows > kTileRows) _tile_stored(2, high, stride);
  if (kRows > kTileRows && kColumns > kTileRows) _tile_stored(3, high + kTileStride, stride);
}

}  // namespace bough::amx
