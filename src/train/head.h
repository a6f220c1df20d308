// Heads, which read the final hidden states during plan execution, and the map from plan blocks to head rows
// and loss rows. A head row is one trained token of the tree. A loss row is one trained token of one
// sequence. Several loss rows may belong to one head row. The policy's head is here, a critic's in critic.h.
// For one block, the policy's head computes log-probabilities of the trained tokens, their loss, and the
// gradient of the hidden states, chunk by chunk (engine.md 3, "Head").
#pragma once

#include <optional>
#include <vector>

#include "kernels/common/host_to_device.h"
#include "models/model.h"
#include "plan/plan.h"
#include "train/executor.h"

namespace bough {

// The head rows of one plan block: its trained tokens, in pre-order. A head row reads the hidden state of the
// token's parent. `sources` index the concatenation of the block's hidden states and the `outside` ones.
struct BlockRows {
  struct Outside {
    int32_t block;         // an ancestor block
    int32_t boundary_row;  // index into that block's RowMap::boundary_rows
  };
  std::vector<int64_t> labels;   // token ids
  std::vector<int64_t> sources;  // < num_tokens: this block's token; else num_tokens + index into `outside`
  std::vector<Outside> outside;
  std::vector<int64_t> loss_begin;  // [head rows + 1]: head row r begins at loss_rows[loss_begin[r]]
  std::vector<int64_t> loss_rows;   // by head row: the indices of its loss rows in the batch
  int64_t num_rows() const { return static_cast<int64_t>(labels.size()); }
};

// A block's row indices on the model's device, int64.
struct RowIndices {
  at::Tensor labels, sources;
  at::Tensor head_rows, loss_rows;  // per loss row of the block: its head row; its index in the batch
};
void add_rows(HostToDeviceBatch& upload, const BlockRows& rows, RowIndices& indices);

struct RowMap {
  std::vector<BlockRows> blocks;
  // By block: the tokens (as indices in the block) whose hidden states the heads of other blocks read. Empty
  // for leaf blocks.
  std::vector<std::vector<int64_t>> boundary_rows;
  // Whether the block or a descendant block trains a token. Blocks without such a token are never run.
  std::vector<bool> needed;
};

RowMap make_row_map(const PlannedTree& planned, const TrainBatch& batch);

// Gradients of a loss that was evaluated before plan execution, for each loss row of the batch: with respect
// to log-probabilities, entropies and the top-k tokens' log-probabilities. Accumulator type. d_entropies_R
// and d_top_k_RK may be undefined.
struct Seeds {
  at::Tensor d_log_probs_R, d_entropies_R, d_top_k_RK;
};

// The loss of some loss rows and its gradients, in the order of these rows. `fields`: the fields of these
// rows, without the leaves (log-probabilities and entropies).
struct EvaluatedLoss {
  LossOutput output;
  Seeds seeds;
};
EvaluatedLoss evaluate_loss(const Loss& loss, LossRows fields, const at::Tensor& log_probs_R,
                            const at::Tensor& entropies_R, const at::Tensor& top_k_log_probs_RK);

// A head runs one plan block at a time. Plan execution may have several heads; their gradients are added.
class BlockHead {
 public:
  virtual ~BlockHead() = default;

  // source_SD: the hidden states that rows.sources index. Returns their gradient in the accumulator type, or
  // an undefined tensor if the head has none.
  virtual at::Tensor run(const BlockRows& rows, const RowIndices& indices, const at::Tensor& source_SD) = 0;
};

// to[rows[i]] += values[i]; an index in `rows` may repeat. Deterministic: on a GPU the indices are sorted
// first, because index_add_ uses atomics in an arbitrary order.
void add_rows_(const at::Tensor& to, const at::Tensor& rows, const at::Tensor& values);

// Sums the losses of plan blocks and their metrics. Sums on a GPU are read together at the end.
class LossSums {
 public:
  void add(LossOutput output);
  // Reads pending GPU values. loss() and metrics() are complete afterwards.
  void finish();
  double loss() const { return loss_; }
  const WeightedSums& metrics() const { return metrics_; }

 private:
  void read_metrics();

  double loss_ = 0;
  WeightedSums metrics_;
  at::Tensor unread_loss_;  // undefined if no GPU value is pending
  MetricReader unread_;
};

class Head final : public BlockHead {
 public:
  // Set `loss` or `seeds`, or neither for a forward-only plan execution.
  struct Options {
    // Its coupling scope must lie within a block. If the loss couples loss rows, the block's logits are
    // computed twice: for the log-probabilities, then for the gradients. Not owned.
    const Loss* loss = nullptr;
    const Seeds* seeds = nullptr;  // read by the constructor only
    int64_t chunk_rows = 0;        // ExecutorOptions::head_chunk_rows
    int64_t top_k = 0;             // number of top-k tokens that a forward-only execution stores, or 0
  };
  // result: must outlive the head. run() stores the outputs of the loss rows, on the model's device. finish()
  // adds the loss and metrics; call it after the last block. Only finish() waits for the GPU.
  Head(const Model& model, const TrainBatch& batch, const Options& options, ExecutionResult* result);

  // Returns an undefined tensor in a forward-only plan execution.
  at::Tensor run(const BlockRows& rows, const RowIndices& indices, const at::Tensor& source_SD) override;
  void finish();

 private:
  // Some consecutive head rows of a block, and their loss rows.
  struct Chunk {
    at::Tensor log_probs, entropies;  // per head row
    at::Tensor head_rows, loss_rows;  // per loss row: its head row in the chunk; its index in the batch
    at::Tensor top_k_LK;              // per loss row; undefined if the batch has no top-k tokens
  };
  // One entry per head row. d_top_k_LK has one per loss row and may be undefined.
  struct ChunkGradients {
    at::Tensor d_log_probs_R, d_entropies_R, d_top_k_LK;
  };
  at::Tensor run_chunks(const BlockRows& rows, const RowIndices& indices, const at::Tensor& source_SD,
                        bool backward);
  ChunkGradients chunk_gradients(const Chunk& chunk);
  // The gradients of a block's loss, from the block's log-probabilities and entropies in result_.
  Seeds block_seeds(const BlockRows& rows);

  const Model& model_;
  const TrainBatch& batch_;
  LossRows fields_;          // the batch's, on the model's device
  at::Tensor top_k_ids_RK_;  // on the model's device
  const Loss* loss_;
  std::optional<Seeds> seeds_;  // on the model's device
  int64_t chunk_rows_;
  int64_t top_k_;
  ExecutionResult* result_;
  LossSums sums_;
};

}  // namespace bough
