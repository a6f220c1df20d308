// The cost of matrix products by shape: FLOPs, and the bytes of the CPU kernels' packed factors and sums.
// matrix_product_cpu.cpp uses the block sizes of this file, so that the estimates match what it allocates. No
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

// Elements that the sum of a product and its residual reads and writes per row.
constexpr int64_t residual_elements(int64_t columns) {
  return 3 * columns;
}

// Minimum number of multiply-adds per thread: starting a thread takes about as long as this many.
constexpr double kMultipliesPerThread = 256 << 10;
constexpr int64_t kPackedRows = 1024;  // rows of A that are packed at a time, if A must be packed

struct Fp32Blocking {
  using Element = float;
  static constexpr int64_t kRows = kBlockRows;
  static constexpr int64_t kDepth = 1;
  static constexpr bool kPadsRows = false;
  // Depth of one pass over A and B. C holds the sums between passes. The L1 cache holds a block of rows of A
  // of this depth. The L2 cache holds four panels of B of this depth. Reading B from it is fast enough.
  static constexpr int64_t kDepthPerPass = 512;
  static constexpr int64_t kGroupBytes = 4 * kDepthPerPass * kPanelColumns * 4;
  static constexpr bool kInParts = false;
};

struct Bf16Blocking {
  using Element = BFloat16Bits;
  static constexpr int64_t kRows = bf16::kBlockRows;
  static constexpr int64_t kDepth = bf16::kDepth;
  static constexpr bool kPadsRows = true;  // incomplete blocks of rows are packed and padded
  // Depth of one pass over A and B if C accumulates. Else one pass has the whole depth, so that a bf16 C is
  // rounded once.
  static constexpr int64_t kDepthPerPass = 512;
  // Bytes of a group of panels of B: half of the L2 cache of CPUs with AMX, all of it on other CPUs. A is
  // read from memory once for each group.
  static constexpr int64_t kGroupBytes = 1 << 20;
  // If the depth is above kWholeDepth, a block of rows of A does not stay in the L1 cache until the next
  // panel. The depth is then split into parts of kPartDepth. The L2 cache holds the fp32 sums of several
  // blocks of C and a part of kPartPanels panels of B.
  static constexpr bool kInParts = true;
  static constexpr int64_t kWholeDepth = 1024, kPartDepth = 512;
  static constexpr int64_t kPartSumBytes = 384 << 10, kPartPanels = 16;
  // For a weight's gradient, the sums use a quarter of the L2 cache, and B another quarter. The L1 cache
  // holds the part of A of one block.
  static constexpr int64_t kSumBytes = 512 << 10, kTurnedDepth = 512;
  static constexpr int64_t kMostBlocks = 8;
};

// bf16 products on a CPU without has_fast_bf16() (isa.h): each block of columns of B is copied to fp32 and
// stays in the L2 cache, and so many rows of A are copied at a time.
struct Fp32Copies {
  static constexpr int64_t kRows = 1024;
  static int64_t columns(int64_t depth) {
    return std::clamp<int64_t>((128 << 10) / std::max<int64_t>(depth, 1), kPanelColumns, 4096);
  }
};

// The sizes, in elements, of the workspace in which one thread computes some panels of a product.
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
  // Number of panels that are packed together (a group). All groups have about the same number of panels.
  static int64_t panel_group(int64_t depth, int64_t panels) {
    int64_t fit = Blocking::kGroupBytes / (panel_elements(depth) * kElementBytes);
    if constexpr (Blocking::kInParts)
      if (is_in_parts(depth)) fit = Blocking::kPartPanels;
    return ceil_div(panels, ceil_div(panels, std::clamp<int64_t>(fit, 1, panels)));
  }
  // Number of blocks of rows whose sums stay in the workspace from one part of the depth to the next.
  static int64_t chunk_blocks(int64_t group) {
    if constexpr (Blocking::kInParts)
      return std::max<int64_t>(1, Blocking::kPartSumBytes / (group * Blocking::kRows * kPanelColumns * 4));
    return 1;
  }
  static int64_t near_elements(int64_t depth) {
    return is_in_parts(depth) ? part_of_depth(depth) * Blocking::kRows : 0;
  }
  // The whole workspace: a group of panels, the last rows of A if they must be padded, and, if the depth is
  // split into parts, the sums and a copy of the rows.
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

// Returns the bytes that c[rows, columns] = a[rows, depth]·b needs in addition to a, b and c.
int64_t matrix_product_bytes(const DeviceKernels& kernels, const ElementSizes& sizes, int64_t rows,
                             int64_t depth, int64_t columns);

// Returns the bytes that a weight's gradient, [outputs, inputs] += d_yᵀ·x over `tokens` tokens, needs in
// addition to d_y, x and the gradient.
int64_t weight_gradient_bytes(const DeviceKernels& kernels, const ElementSizes& sizes, int64_t tokens,
                              int64_t outputs, int64_t inputs);

}  // namespace bough
