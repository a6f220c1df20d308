// What the blocks of a plan keep between their forward and their backward (Keep), by the memory there is, and
// what a block's backward then takes.
#pragma once

#include <span>

#include "plan/plan.h"

namespace bough {

// Bytes of the pass with a graph of a block that keeps this, beside the stack and what interior blocks keep:
// of an interior block what it does not hold already.
int64_t pass_bytes(const PassCosts& costs, const Block& block, Keep keep);

// Seconds of the block's backward: what it computes again, its head, and the way back through its layers.
double backward_seconds(const PassCosts& costs, const Block& block);

// What blocks choose from.
struct KeepRules {
  LayerRecompute layers = LayerRecompute::kNever;
  ActivationOffload offload = ActivationOffload::kWhereNeeded;
  bool interior_may_keep_more = false;  // than they must: attention's outputs, or all, where there is room
};

// Of any pass of this shape, with what it keeps of its own: no block of it takes less.
int64_t least_pass_bytes(const PassCosts& costs, const PassShape& pass, const KeepRules& rules);

// Decides of each block of one tree, or of one chain of blocks, what it keeps so that the peak stays within
// `room` bytes beside the stack and the loss's rows: the most recomputation saved. Where nothing fits, what
// takes least. `above` of a block is an index into `blocks`, or -1.
//
// A block recomputes its layers one by one where its pass does not fit otherwise; of an interior one that
// holds its layers' inputs while what hangs off it runs, so those are set aside first, from the root down.
// The rest is given to children before parents: a block near the leaves opens once for each of many chains,
// one near the root for all of them together, so memory spent lower down saves more recomputation.
//
// Where a tree or chain does not fit so, it is gone through once more with the host's memory for the layers'
// inputs of those blocks that do not fit otherwise.
void choose_kept(std::span<Block> blocks, const PassCosts& costs, int64_t room, const KeepRules& rules);

}  // namespace bough
