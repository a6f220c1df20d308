// Packed bf16 factors (matrix_product_tiles.h): 1 KiB at a time, 16 rows of a line each.
#pragma once

#include <cstdint>

namespace bough::bf16 {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileStride = 64;  // a row: 16 sums, 32 elements, or 16 pairs

}  // namespace bough::bf16
