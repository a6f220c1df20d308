// What matrix products cost, from shapes alone: FLOPs, and the bytes that the CPU's kernels pack factors and
// keep sums in. The sizes that those kernels cut their work into stand here once: matrix_product_cpu.cpp cuts
// by them, and what is counted is what it allocates. No torch.
#pragma once

#include <algorithm>

#include "kernels/common/device_kernels.h"
#include "kernels/matrix_product/matrix_product_tiles.h"

namespace bough {

// FLOPs of a product; a multiply-add counts as two.
constexpr int64_t matrix_product_flops(int64_t rows, int64_t depth, int64_t columns) {
  return 2 * rows * depth * columns;
}

// Less work than this for each of two threads is done by one: a start costs about as much as a quarter of a
// million multiply-adds.
constexpr double kMultipliesPerThread = 256 << 10;
constexpr int64_t kPackedRows = 1024;  // of a factor that must be packed, at a time

struct Fp32Blocking {
  using Element = float;
  static constexpr int64_t kRows = avx512::kBlockRows;
  static constexpr int64_t kDepth = 1;
  static constexpr bool kPadsRows = false;
  // Sums are kept in C between passes. Four panels of that depth come from the second-level cache, as fast as
  // they are needed, for each block of rows that the first-level one keeps.
  static constexpr int64_t kDepthPerPass = 512;
  static constexpr int64_t kGroupBytes = 4 * kDepthPerPass * kPanelColumns * 4;
  static constexpr bool kInParts = false;
};

struct Bf16Blocking {
  using Element = BFloat16Bits;
  static constexpr int64_t kRows = bf16::kBlockRows;
  static constexpr int64_t kDepth = bf16::kDepth;
  static constexpr bool kPadsRows = true;  // the last rows of a factor are packed, too
  // The depth of a pass over an accumulated C; a bf16 C is rounded once.
  static constexpr int64_t kDepthPerPass = 512;
  // The bytes of a group of panels are half of the second-level cache of CPUs with AMX, all of others': A,
  // which comes from further away, is read once for each group.
  static constexpr int64_t kGroupBytes = 1 << 20;
  // A block of rows of a longer depth leaves the first-level cache before the next panel: it comes in parts,
  // and fp32 sums of several blocks wait in the second-level cache beside the parts of a group's panels.
  static constexpr bool kInParts = true;
  static constexpr int64_t kWholeDepth = 1024, kPartDepth = 512;
  static constexpr int64_t kPartSumBytes = 384 << 10, kPartPanels = 16;
  // A weight's gradient takes a quarter of the second-level cache for sums, as much for B; a block's part of
  // A stays in the first-level one.
  static constexpr int64_t kSumBytes = 512 << 10, kTurnedDepth = 512;
  static constexpr int64_t kMostBlocks = 8;
};

// What one thread holds for some panels of a product, in elements.
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
  // How many of so many panels are packed together: groups are of about one size.
  static int64_t panel_group(int64_t depth, int64_t panels) {
    int64_t fit = Blocking::kGroupBytes / (panel_elements(depth) * kElementBytes);
    if constexpr (Blocking::kInParts)
      if (is_in_parts(depth)) fit = Blocking::kPartPanels;
    return ceil_div(panels, ceil_div(panels, std::clamp<int64_t>(fit, 1, panels)));
  }
  // Number of blocks of rows whose sums wait for the next part of the depth.
  static int64_t chunk_blocks(int64_t group) {
    if constexpr (Blocking::kInParts)
      return std::max<int64_t>(1, Blocking::kPartSumBytes / (group * Blocking::kRows * kPanelColumns * 4));
    return 1;
  }
  static int64_t near_elements(int64_t depth) {
    return is_in_parts(depth) ? part_of_depth(depth) * Blocking::kRows : 0;
  }
  // Elements that a thread holds: its panels, the last rows of A where they must be padded, and what products
  // in parts keep near.
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

// Bytes in flight in c[rows, columns] = a[rows, depth]·b, beside its factors and itself.
int64_t matrix_product_bytes(const DeviceKernels& kernels, const ElementSizes& sizes, int64_t rows,
                             int64_t depth, int64_t columns);

// Bytes in flight in a weight's gradient, [outputs, inputs] += d_yᵀ·x over so many tokens, beside its
// operands.
int64_t weight_gradient_bytes(const DeviceKernels& kernels, const ElementSizes& sizes, int64_t tokens,
                              int64_t outputs, int64_t inputs);

}  // namespace bough
