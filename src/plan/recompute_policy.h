// Chooses the RecomputePolicy of each block of a plan (Block::keep): what the block holds between its forward
// and its backward, by the memory budget. Also gives the bytes and seconds that follow from the choice.
#pragma once

#include <span>

#include "plan/plan.h"

namespace bough {

// Bytes of the pass of a block that records the graph. Not included: the stack, and the activations that open
// interior blocks hold (those of `block` too, if it is interior).
int64_t pass_bytes(const PassCosts& costs, const Block& block, RecomputePolicy keep);

// Seconds of the block's backward step: recomputation, lm_head forward and backward, layers backward.
double backward_seconds(const PassCosts& costs, const Block& block);

// Which policies blocks may have.
struct RecomputeRules {
  LayerRecompute layers = LayerRecompute::kNever;
  ActivationOffload offload = ActivationOffload::kWhereNeeded;
  bool interior_may_keep_more = false;  // true: kAttention and kActivations are allowed in interior blocks
};

// Lower bound, over the policies that the rules allow, of the bytes of a pass of this shape and the
// activations that its block keeps.
int64_t least_pass_bytes(const PassCosts& costs, const PassShape& pass, const RecomputeRules& rules);

// Sets `keep` of each block of one tree, or of one chain of blocks. The peak stays within `room` bytes, and
// the recomputation takes as little time as possible. `room` excludes the stack and the loss rows. If nothing
// fits, the policies with the smallest peak are chosen. Block::above is an index into `blocks`, or -1.
//
//   1. A block recomputes layer by layer only if its pass does not fit otherwise. Such an interior block
//      holds its layer inputs while its descendants run. These bytes are reserved first, from the root down.
//   2. The remaining bytes go to children before parents. Blocks near the leaves are open one chain at a
//      time, so the same bytes serve many blocks and save more recomputation.
//   3. If the tree or chain still does not fit, steps 1 and 2 run again. This time, a block that does not
//      fit may hold its layer inputs in host memory.
void choose_recompute_policies(std::span<Block> blocks, const PassCosts& costs, int64_t room,
                               const RecomputeRules& rules);

}  // namespace bough
