// bf16 products by AMX tiles: 16 x 32 of A times 32 x 16 of B, summed in fp32 (Intel SDM, TDPBF16PS).
#include <immintrin.h>

#include "kernels/matrix_product/amx_sums.h"
#include "kernels/matrix_product/bf16_products.h"
#include "kernels/matrix_product/upcoming_lines.h"

namespace bough::amx {

namespace {
// The compiler does not know that tile intrinsics read memory. Here this causes no error, because the memory
// is constant or was written in another file.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {kTileStride, kTileStride, kTileStride, kTileStride,
                            kTileStride, kTileStride, kTileStride, kTileStride};
  uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows};
};
constexpr TileConfig kEightFullTiles;
static_assert(sizeof(TileConfig) == 64);

// Adds the products of 32 rows of A and 32 columns of B, of depth 32, to the sums in tiles 0 to 3. Loads of B
// bypass the L1 cache, so that the rows of A, which the next columns need again, stay in it.
template <int64_t kRows, int64_t kColumns>
inline void multiply_step(const char* a_low, const char* a_high, int64_t a_stride, const char* b) {
  constexpr bool kBothRows = kRows > kTileRows, kBothColumns = kColumns > kTileRows;
  _tile_stream_loadd(6, b, kTileStride);
  _tile_loadd(4, a_low, a_stride);
  _tile_dpbf16ps(0, 4, 6);
  if (kBothColumns) {
    _tile_stream_loadd(7, b + kTileBytes, kTileStride);
    _tile_dpbf16ps(1, 4, 7);
  }
  if (kBothRows) {
    _tile_loadd(5, a_high, a_stride);
    _tile_dpbf16ps(2, 5, 6);
    if (kBothColumns) _tile_dpbf16ps(3, 5, 7);
  }
}

template <int64_t kColumns>
inline void multiply(float* c, int64_t c_stride, bool accumulate, const BFloat16Bits* a, int64_t a_stride,
                     bool packed, const BFloat16Bits* panel, int64_t depth, const Upcoming& written,
                     const Upcoming& read) {
  load_sums<bf16::kBlockRows, kColumns>(c, c_stride, accumulate);
  const int64_t row = packed ? kTileStride : a_stride * 2;
  const int64_t step = packed ? 2 * kTileBytes : kTileStride;
  const auto* a_low = reinterpret_cast<const char*>(a);
  const char* a_high = a_low + (packed ? kTileBytes : kTileRows * row);
  const auto* b = reinterpret_cast<const char*>(panel);
  const int64_t steps = (depth + bf16::kDepth - 1) / bf16::kDepth;
  UpcomingLines to_write(written, bf16::kBlockRows, steps), to_read(read, bf16::kBlockRows, steps);
  for (int64_t i = 0; i < steps; ++i) {
    multiply_step<bf16::kBlockRows, kColumns>(a_low, a_high, row, b);
    to_write.write_soon();
    to_read.read_soon();
    a_low += step;
    a_high += step;
    b += 2 * kTileBytes;
  }
  store_sums<bf16::kBlockRows, kColumns>(c, c_stride);
}

template <int64_t kRows>
inline void add(float* c, int64_t c_stride, const BFloat16Bits* const* a, const BFloat16Bits* const* b,
                int64_t count) {
  load_sums<kRows, kPanelColumns>(c, c_stride, true);
  for (int64_t i = 0; i < count; ++i) {
    const auto* block = reinterpret_cast<const char*>(a[i]);
    multiply_step<kRows, kPanelColumns>(block, block + kTileBytes, kTileStride,
                                        reinterpret_cast<const char*>(b[i]));
  }
  store_sums<kRows, kPanelColumns>(c, c_stride);
}
}  // namespace

void begin_tiles() {
  _tile_loadconfig(&kEightFullTiles);
}

void end_tiles() {
  _tile_release();
}

void multiply_block(float* c, int64_t c_stride, bool accumulate, const BFloat16Bits* a, int64_t a_stride,
                    bool packed, const BFloat16Bits* panel, int64_t columns, int64_t depth,
                    const Upcoming& written, const Upcoming& read) {
  if (columns > kTileRows)
    multiply<kPanelColumns>(c, c_stride, accumulate, a, a_stride, packed, panel, depth, written, read);
  else multiply<kTileRows>(c, c_stride, accumulate, a, a_stride, packed, panel, depth, written, read);
}

void add_products(float* c, int64_t c_stride, const BFloat16Bits* const* a, const BFloat16Bits* const* b,
                  int64_t count, int64_t rows) {
  rows > kTileRows ? add<bf16::kBlockRows>(c, c_stride, a, b, count)
                   : add<kTileRows>(c, c_stride, a, b, count);
}

}  // namespace bough::amx
