// What reads the final hidden states of a walk: a head, of which the policy's is here and a critic's in
// critic.h. Which rows of the head and of the loss belong to which block of a planned tree, and the head of
// one block: log-probabilities of its trained tokens, their loss where asked, and the gradient of the hidden
// states they were predicted from, chunk by chunk (engine.md 3, "Head").
#pragma once

#include <optional>
#include <vector>

#include "kernels/common/upload.h"
#include "models/model.h"
#include "plan/plan.h"
#include "train/executor.h"

namespace bough {

// The head rows of one block: its tokens that some sequence trains, in pre-order. A row's hidden state is
// that of the token's parent: row `source` of the block's own hidden states followed by those listed in
// `outside`.
struct BlockRows {
  struct Outside {
    int32_t block;  // an interior block below
    int32_t exit;   // index into its exits
  };
  std::vector<int64_t> labels;   // token ids
  std::vector<int64_t> sources;  // < num_tokens: own; else num_tokens + index into `outside`
  std::vector<Outside> outside;
  std::vector<int64_t> loss_begin;  // [rows + 1]: the loss rows of row r are loss_rows[loss_begin[r] ..]
  std::vector<int64_t> loss_rows;   // of the batch
  int64_t num_rows() const { return static_cast<int64_t>(labels.size()); }
};

// The numbers of a block's rows on the model's device, int64.
struct RowIndices {
  at::Tensor labels, sources;
  at::Tensor head_rows, loss_rows;  // by loss row: its head row; its row of the batch
};
void add_rows(Upload& upload, const BlockRows& rows, RowIndices& indices);

struct RowMap {
  std::vector<BlockRows> blocks;
  // By interior block: its tokens (as local rows) whose hidden states other blocks' heads read.
  std::vector<std::vector<int64_t>> exits;
  // Whether the block, or anything that runs on top of it, trains a token. A block that does not is never
  // run.
  std::vector<bool> needed;
};

RowMap make_row_map(const PlannedTree& planned, const TrainBatch& batch);

// Gradients of log_probs, entropies and given log-probabilities of all loss rows, from a loss that was
// evaluated before the walk. Of the batch, accumulator type; the last two may be undefined.
struct Seeds {
  at::Tensor d_log_probs_R, d_entropies_R, d_given_RK;
};

// A loss of some rows, and its gradients as seeds, by those rows. `fields`: of these rows, without leaves.
struct EvaluatedLoss {
  LossOutput output;
  Seeds seeds;
};
EvaluatedLoss evaluate_loss(const Loss& loss, LossRows fields, const at::Tensor& log_probs_R,
                            const at::Tensor& entropies_R, const at::Tensor& given_log_probs_RK);

// One block at a time. A walk may have several heads, whose gradients of the hidden states add.
class BlockHead {
 public:
  virtual ~BlockHead() = default;

  // source_SD: hidden states that rows.sources index. Returns their gradient (accumulator type), or an
  // undefined tensor where the head sends none.
  // indices: of the rows.
  virtual at::Tensor run(const BlockRows& rows, const RowIndices& indices, const at::Tensor& source_SD) = 0;
};

// to[rows[i]] += values[i], rows repeated or not, the same bits every time: on a GPU the rows are sorted
// first, where index_add_ would add by atomics, in whatever order.
void add_rows_(const at::Tensor& to, const at::Tensor& rows, const at::Tensor& values);

// Losses of blocks and their metrics. Those of rows on a GPU are summed there and read at the end, together.
class LossSums {
 public:
  void add(LossOutput output);
  // Reads what waits: the loss and its metrics are whole.
  void finish();
  double loss() const { return loss_; }
  const WeightedSums& metrics() const { return metrics_; }

 private:
  void read_metrics();

  double loss_ = 0;
  WeightedSums metrics_;
  at::Tensor unread_loss_;  // undefined: none waits
  MetricReader unread_;
};

class Head final : public BlockHead {
 public:
  // `loss` or `seeds`, or neither for a forward-only walk. What the loss couples lies within a block; then
  // the block's values are computed before their loss, which costs its logits once more. `top_k`: most likely
  // tokens that a forward-only walk files, or 0. `result`, which must outlive the head, gets values of every
  // row, on the model's device, and the loss and its metrics: all of them with finish(), after the last
  // block, before which no GPU is waited for.
  Head(const Model& model, const TrainBatch& batch, const Loss* loss, const Seeds* seeds, int64_t chunk_rows,
       int64_t top_k, WalkResult* result);

  // Undefined in a forward-only walk.
  at::Tensor run(const BlockRows& rows, const RowIndices& indices, const at::Tensor& source_SD) override;
  void finish();

 private:
  // Some rows of a block: values by head row, and which loss rows they are.
  struct Chunk {
    at::Tensor log_probs, entropies;  // by head row
    at::Tensor head_rows, loss_rows;  // by loss row: its head row within the chunk; its row of the batch
    at::Tensor given_LK;              // by loss row; undefined where the batch has no given ids
  };
  // By head row, but d_given_LK by loss row; that may be undefined.
  struct ChunkGradients {
    at::Tensor d_log_probs_R, d_entropies_R, d_given_LK;
  };
  at::Tensor run_chunks(const BlockRows& rows, const RowIndices& indices, const at::Tensor& source_SD,
                        bool backward);
  ChunkGradients chunk_gradients(const Chunk& chunk);
  // The seeds of a block whose values are filed.
  Seeds block_seeds(const BlockRows& rows);

  const Model& model_;
  const TrainBatch& batch_;
  LossRows fields_;          // the batch's, on the model's device
  at::Tensor given_ids_RK_;  // likewise
  const Loss* loss_;
  std::optional<Seeds> seeds_;  // likewise
  int64_t chunk_rows_;
  int64_t top_k_;
  WalkResult* result_;
  LossSums sums_;
};

}  // namespace bough
