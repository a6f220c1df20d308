// The tensors of one pass that depend on the plan and the batch alone: token ids, positions, the attention
// mask, and what generation recorded for the tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "kernels/common/host_to_device.h"
#include "kernels/tree_attention/tree_attention_segments.h"
#include "models/config.h"
#include "plan/plan.h"
#include "train/context_parallel.h"
#include "train/make_batch.h"

namespace bough {

struct PassInput {
  at::Tensor tokens_T, positions_T;  // int64
  KeyEnds ends;
  std::vector<uint8_t> is_sampled;                 // [T]
  std::vector<std::span<const uint16_t>> replays;  // [T]: the pages that generation kept; or empty
  at::Tensor experts_TLK;                          // flat; the pass's ExpertRoutes. Undefined: no records
  at::Tensor flat_counts_T;                        // with losses of routers: RouterLosses::counts_T
  std::vector<QuerySegment> segments;              // runs for the vendor's attention; or empty
  // With context parallelism: how the ranks split the pass. `shared` then has the ends and segments of this
  // rank, and tokens_T and positions_T hold this rank's tokens. nullptr if context parallelism is off.
  std::shared_ptr<ContextPass> shared;
};

struct PassSource {
  const PrefixTree& tree;
  const Block& block;
  const TrainBatch& batch;
  const std::vector<int32_t>& stack_tokens;  // the tree token of each row of the prefix KV stack
  const std::vector<int64_t>& flat_counts;   // by tree token (router_losses.h); empty: not needed
  const ModelConfig* recorded = nullptr;  // tokens use recorded experts of this model; nullptr: they do not
  Communicator* context_ranks = nullptr;  // nullptr if context parallelism is off
  int64_t least_run = 0;                  // ExecutorOptions::least_run; 0: one call computes all queries
};

// Sets `input`, whose index tensors are defined only after the caller has sent `upload`.
void make_pass_input(const PassSource& source, HostToDeviceBatch& upload, PassInput& input);

}  // namespace bough
