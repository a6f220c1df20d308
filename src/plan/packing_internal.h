// What the packing algorithms share.
#pragma once

#include "tree/branch_tree.h"
#include "plan/packing.h"

namespace bough::internal {

// Leaves (node indices) that are computed together.
struct LeafBin {
  std::vector<int32_t> leaves;
  int64_t num_tokens = 0;
};

// UserError for a capacity below 1, or below the longest sequence.
void check_capacity(const PrefixTree& tree, int64_t capacity);

// Bins of leaves to bins of sequences, in the order of their first leaves; checks sizes against the capacity.
Packing to_packing(const BranchTree& branches, std::vector<LeafBin> bins, int64_t capacity);

}  // namespace bough::internal
