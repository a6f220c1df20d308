#include "kernels/matrix_product/matrix_product_cost.h"

namespace bough {

namespace {

// Returns the bytes of packed factors and sums of all threads together. Panels of B are divided among threads
// as in run_rows() of matrix_product_cpu.cpp.
template <class Blocking>
int64_t packed_bytes(int64_t num_threads, int64_t rows, int64_t depth, int64_t columns) {
  const bool alone = static_cast<double>(rows) * static_cast<double>(depth) * static_cast<double>(columns) <
                     2 * kMultipliesPerThread;
  const int64_t threads = alone ? 1 : num_threads;
  const int64_t panels = ceil_div(columns, kPanelColumns);
  const int64_t share = panels >= threads ? ceil_div(panels, threads) : panels;
  using Workspace = BlockWorkspace<Blocking>;
  return threads * Workspace::elements(depth, share) * Workspace::kElementBytes;
}

int64_t fp32_bytes(int64_t threads, int64_t rows, int64_t depth, int64_t columns) {
  return packed_bytes<Fp32Blocking>(threads, rows, std::min(depth, Fp32Blocking::kDepthPerPass), columns);
}

// product_of_fp32_copies() of matrix_product_cpu.cpp.
int64_t copied_bytes(const DeviceKernels& kernels, const ElementSizes& sizes, int64_t rows, int64_t depth,
                     int64_t columns) {
  const int64_t copied_rows = std::min(rows, Fp32Copies::kRows);
  const int64_t copied_columns = std::min(columns, Fp32Copies::columns(depth));
  const bool alone = ceil_div(columns, copied_columns) < kernels.threads;
  int64_t block = (depth + copied_rows) * copied_columns * sizes.accumulator;
  if (kernels.packs_factors)
    block += fp32_bytes(alone ? kernels.threads : 1, copied_rows, depth, copied_columns);
  return copied_rows * depth * sizes.accumulator + (alone ? 1 : kernels.threads) * block;
}

}  // namespace

int64_t matrix_product_bytes(const DeviceKernels& kernels, const ElementSizes& sizes, int64_t rows,
                             int64_t depth, int64_t columns) {
  if (kernels.copies_factors) return copied_bytes(kernels, sizes, rows, depth, columns);
  if (!kernels.packs_factors) return 0;
  if (!kernels.has_bf16_tiles())
    return sizes.element == sizes.accumulator ? fp32_bytes(kernels.threads, rows, depth, columns) : 0;
  // The rows of A are packed if the depth is not a multiple of a tile's depth.
  const int64_t packed = depth % Bf16Blocking::kDepth == 0
                             ? 0
                             : std::min(rounded_up(rows, Bf16Blocking::kRows), kPackedRows) *
                                   rounded_up(depth, Bf16Blocking::kDepth) * sizes.element;
  return packed + packed_bytes<Bf16Blocking>(kernels.threads, rows, depth, columns);
}

// With bf16 tiles, x is packed as a whole, and each thread packs d_yᵀ in parts of up to kMostBlocks blocks of
// rows and kTurnedDepth tokens. With fp32 tiles, d_yᵀ is packed in parts of kPackedRows rows and
// kDepthPerPass tokens. On a CPU without bf16 tiles, bf16 x and d_y are first converted to fp32.
int64_t weight_gradient_bytes(const DeviceKernels& kernels, const ElementSizes& sizes, int64_t tokens,
                              int64_t outputs, int64_t inputs) {
  using Attention = DeviceKernels::Attention;
  const bool widens = kernels.attention == Attention::kTiles || kernels.attention == Attention::kReference ||
                      kernels.widens_factors;
  int64_t bytes = 0;
  if (widens && sizes.element < sizes.accumulator) bytes += tokens * (outputs + inputs) * sizes.accumulator;
  if (!kernels.packs_factors) return bytes;
  if (kernels.has_bf16_tiles()) {
    using Tiles = Bf16Blocking;
    const int64_t share = rounded_up(ceil_div(outputs, kernels.threads), Tiles::kRows);
    const int64_t packed_rows = std::min(share, Tiles::kMostBlocks * Tiles::kRows);
    return bytes + (rounded_up(tokens, Tiles::kDepth) * rounded_up(inputs, kPanelColumns) +
                    kernels.threads * packed_rows * Tiles::kTurnedDepth) *
                       sizes.element;
  }
  const int64_t depth = std::min(tokens, Fp32Blocking::kDepthPerPass);
  const int64_t rows = std::min(rounded_up(outputs, kPanelColumns), kPackedRows);
  return bytes + rows * depth * sizes.accumulator + fp32_bytes(kernels.threads, rows, depth, inputs);
}

}  // namespace bough
