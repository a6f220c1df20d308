// Runs a plan's blocks in the order of its steps: one pass of the model per block and direction, with the
// prefix KV stack, the heads and the messages between pipeline stages. executor.h describes the order and is
// the interface for other modules.
#pragma once

#include <cstdint>
#include <vector>

#include "train/executor.h"
#include "train/head.h"
#include "train/tree_context.h"

namespace bough {

struct BlockCounts {
  ReplayCounts replays;     // page lists of the first forward passes
  int64_t num_uploads = 0;  // copies of index tensors to the device
};

// Runs the blocks that train a token, or have a descendant that does. A pipeline stage runs its layers of
// each block. The heads run on the last stage only. backward: backpropagates into main_grad. If false, each
// block is computed once, forward only.
BlockCounts execute_blocks(Model& model, const ExecutorOptions& options, const Plan& plan,
                           const TrainBatch& batch, std::vector<BlockHead*> heads, bool backward);

}  // namespace bough
