// Runs a plan's blocks in the order of its steps: one pass of the model per block and direction, with the
// prefix KV stack, the heads and the messages between pipeline stages. executor.h describes the order and is
// the interface for other modules.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "train/executor.h"
#include "train/head.h"
#include "train/tree_context.h"

namespace bough {

struct BlockCounts {
  ReplayCounts replays;     // page lists of the first forward passes
  int64_t num_uploads = 0;  // copies of index tensors to the device
  RouteCounts routes;       // a mixture's
  RouterSums router_sums;   // with losses of a mixture's routers
};

// Runs the blocks that train a token, or have a descendant that does. A pipeline stage runs its layers of
// each block. The heads run on the last stage only. backward: backpropagates into main_grad. If false, each
// block is computed once, forward only.
BlockCounts execute_blocks(Model& model, const ExecutorOptions& options, const Plan& plan,
                           const TrainBatch& batch, std::vector<BlockHead*> heads, bool backward);

// Whether every tree of the plan is one leaf block without a prefix KV stack, as in plans of `packed`. Only
// such a plan can be executed in two phases (TwoPhases), because blocks of a path share rows of the stack.
bool has_only_leaf_blocks(const Plan& plan);

// The forward of all blocks, then the backward of all blocks, with the activations of the whole batch held in
// between. A head runs once in each phase. Throws InternalError unless has_only_leaf_blocks(plan). The
// arguments must outlive the object.
class TwoPhases {
 public:
  // Runs the forward phase. The heads must return no gradient.
  TwoPhases(Model& model, const ExecutorOptions& options, const Plan& plan, const TrainBatch& batch,
            std::vector<BlockHead*> heads);
  ~TwoPhases();
  // Backpropagates the heads' gradients into main_grad and frees the activations. Call it at most once.
  void backward(std::vector<BlockHead*> heads);

 private:
  class Execution;
  std::unique_ptr<Execution> execution_;
};

}  // namespace bough
