// Chooses what each block of a plan holds between its forward and its backward (Keep), by the memory budget.
// Also gives the bytes and seconds that follow from the choice.
#pragma once

#include <span>

#include "plan/plan.h"

namespace bough {

// Bytes of the block's pass that records a graph. Not included: the stack, and the bytes that open interior
// blocks hold (this block too, if it is interior).
int64_t pass_bytes(const PassCosts& costs, const Block& block, RecomputePolicy keep);

// Seconds of the block's backward step: recomputation, lm_head forward and backward, layers backward.
double backward_seconds(const PassCosts& costs, const Block& block);

// The values of Keep that blocks may have.
struct RecomputeRules {
  LayerRecompute layers = LayerRecompute::kNever;
  ActivationOffload offload = ActivationOffload::kWhereNeeded;
  bool interior_may_keep_more = false;  // true: kAttention and kActivations are allowed in interior blocks
};

// Lower bound of the bytes of a pass of this shape, with the activations it keeps, under these rules.
int64_t least_pass_bytes(const PassCosts& costs, const PassShape& pass, const RecomputeRules& rules);

// Sets `keep` of each block of one tree, or of one chain of blocks. The peak stays within `room` bytes, and
// as much recomputation as possible is saved. `room` excludes the stack and the rows of the loss. If nothing
// fits, the smallest peak is chosen. Block::above is an index into `blocks`, or -1.
//
//   1. A block recomputes layer by layer only if its pass does not fit otherwise. Such an interior block
//      holds its layer inputs while its descendants run. These bytes are reserved first, from the root down.
//   2. The remaining bytes go to children before parents. Blocks near the leaves are open one chain at a
//      time, so the same bytes serve many blocks and save more recomputation.
//   3. If the tree or chain still does not fit, steps 1 and 2 run again. Now a block that does not fit may
//      hold its layer inputs in host memory.
void choose_recompute_policies(std::span<Block> blocks, const PassCosts& costs, int64_t room,
                               const RecomputeRules& rules);

}  // namespace bough
