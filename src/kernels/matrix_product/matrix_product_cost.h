// The cost of matrix products by shape: FLOPs, and the bytes of the CPU kernels' packed factors and sums.
// matrix_product_cpu.cpp uses the block sizes defined here, so that the estimates match its allocations. No
// torch.
#pragma once

#include <algorithm>

#include "kernels/common/device_kernels.h"
#include "kernels/matrix_product/matrix_product_tiles.h"

namespace bough {

// FLOPs of a product; a multiply-add counts as two.
constexpr int64_t matrix_product_flops(int64_t rows, int64_t depth, int64_t columns) {
  return 2 * rows * depth * columns;
}

// Minimum number of multiply-adds per thread. Starting a thread costs about as much as this many.
constexpr double kMultipliesPerThread = 256 << 10;
constexpr int64_t kPackedRows = 1024;  // rows packed at a time, of a factor that must be packed

struct Fp32Blocking {
  using Element = float;
  static constexpr int64_t kRows = avx512::kBlockRows;
  static constexpr int64_t kDepth = 1;
  static constexpr bool kPadsRows = false;
  // Depth of one pass. C holds the sums between passes. The L1 cache holds a block of rows of this depth.
  // The L2 cache holds four panels of it and delivers them as fast as they are needed.
  static constexpr int64_t kDepthPerPass = 512;
  static constexpr int64_t kGroupBytes = 4 * kDepthPerPass * kPanelColumns * 4;
  static constexpr bool kInParts = false;
};

struct Bf16Blocking {
  using Element = BFloat16Bits;
  static constexpr int64_t kRows = bf16::kBlockRows;
  static constexpr int64_t kDepth = bf16::kDepth;
  static constexpr bool kPadsRows = true;  // incomplete blocks of rows are packed and padded
  // The depth of a pass if C accumulates. A bf16 C is written in one pass, so that it is rounded once.
  static constexpr int64_t kDepthPerPass = 512;
  // Bytes of a group of panels: half of the L2 cache of CPUs with AMX, all of it on others. A is read from
  // memory once for each group.
  static constexpr int64_t kGroupBytes = 1 << 20;
  // A block of rows with a depth above kWholeDepth does not stay in the L1 cache until the next panel. The
  // depth is then split into parts of kPartDepth. The L2 cache holds the fp32 sums of several blocks and the
  // parts of kPartPanels panels.
  static constexpr bool kInParts = true;
  static constexpr int64_t kWholeDepth = 1024, kPartDepth = 512;
  static constexpr int64_t kPartSumBytes = 384 << 10, kPartPanels = 16;
  // A weight's gradient uses a quarter of the L2 cache for sums and as much for B. The L1 cache holds a
  // block's part of A.
  static constexpr int64_t kSumBytes = 512 << 10, kTurnedDepth = 512;
  static constexpr int64_t kMostBlocks = 8;
};

// The workspace that one thread needs for some panels of a product, in elements.
template <class Blocking>
struct BlockWorkspace {
  static constexpr int64_t kElementBytes = sizeof(typename Blocking::Element);

  static int64_t part_of_depth(int64_t depth) {
    if constexpr (Blocking::kInParts)
      if (depth > Blocking::kWholeDepth) return Blocking::kPartDepth;
    return depth;
  }
  static bool is_in_parts(int64_t depth) { return part_of_depth(depth) < depth; }
  static int64_t panel_elements(int64_t depth) { return rounded_up(depth, Blocking::kDepth) * kPanelColumns; }
  static int64_t block_elements(int64_t depth) {
    return rounded_up(depth, Blocking::kDepth) * Blocking::kRows;
  }
  // Number of panels that are packed together. All groups have about the same size.
  static int64_t panel_group(int64_t depth, int64_t panels) {
    int64_t fit = Blocking::kGroupBytes / (panel_elements(depth) * kElementBytes);
    if constexpr (Blocking::kInParts)
      if (is_in_parts(depth)) fit = Blocking::kPartPanels;
    return ceil_div(panels, ceil_div(panels, std::clamp<int64_t>(fit, 1, panels)));
  }
  // Number of blocks of rows whose sums are kept until the next part of the depth.
  static int64_t chunk_blocks(int64_t group) {
    if constexpr (Blocking::kInParts)
      return std::max<int64_t>(1, Blocking::kPartSumBytes / (group * Blocking::kRows * kPanelColumns * 4));
    return 1;
  }
  static int64_t near_elements(int64_t depth) {
    return is_in_parts(depth) ? part_of_depth(depth) * Blocking::kRows : 0;
  }
  // Total: a group of panels, the last rows of A if they must be padded, and the buffers of products in
  // parts.
  static int64_t elements(int64_t depth, int64_t panels) {
    const int64_t group = panel_group(depth, panels);
    int64_t elements =
        group * panel_elements(depth) + (Blocking::kPadsRows ? block_elements(depth) : int64_t{0});
    if (is_in_parts(depth))
      elements += near_elements(depth) + chunk_blocks(group) * group * Blocking::kRows * kPanelColumns *
                                             (int64_t{sizeof(float)} / kElementBytes);
    return elements;
  }
};

// Returns the temporary bytes of c[rows, columns] = a[rows, depth]·b, without a, b and c.
int64_t matrix_product_bytes(const DeviceKernels& kernels, const ElementSizes& sizes, int64_t rows,
                             int64_t depth, int64_t columns);

// Returns the temporary bytes of a weight's gradient, [outputs, inputs] += d_yᵀ·x over `tokens` tokens,
// without its operands.
int64_t weight_gradient_bytes(const DeviceKernels& kernels, const ElementSizes& sizes, int64_t tokens,
                              int64_t outputs, int64_t inputs);

}  // namespace bough
