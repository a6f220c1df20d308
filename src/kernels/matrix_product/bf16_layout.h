// Packed bf16 factors (matrix_product_tiles.h) consist of tiles of 1 KiB: 16 rows of one 64-byte cache line
// each.
#pragma once

#include <cstdint>

namespace bough::bf16 {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileStride = 64;  // bytes of a row: 16 fp32 sums, 32 bf16 elements, or 16 pairs of them

}  // namespace bough::bf16
