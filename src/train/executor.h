// Executes a plan: log-probabilities, loss and gradients of a batch, each shared token computed once
// (engine.md 3).
//
// Walk. forward(b) of an interior block pushes its keys and values; a leaf block runs forward, head, loss and
// backward at once; backward(b) recomputes an interior block with a graph, seeds it with its own loss, with
// what other blocks' heads sent to its hidden states and, through the anchors, with what they sent to its
// keys and values, and pops it.
//
// Head. Prediction belongs to the child: the log-probability of token t is computed in t's block from the
// final hidden state of parent(t), which may lie in a block below. Only tokens that some sequence trains are
// computed, in chunks of rows, so that [rows, vocabulary] is never whole.
//
// Stages. Of a pipeline (models/pipeline.h) each stage walks the same plan through its own layers: hidden
// states come from the stage before and go to the next, their gradients come back, in the order of
// plan/pipeline.h. Heads, losses and exits are the last stage's.
//
// Accumulates (+=): parameters' main_grad. Overwrites: nothing else of the model.
#pragma once

#include <memory>
#include <optional>

#include "comm/communicator.h"
#include "kernels/page_choice/page_choice.h"
#include "models/model.h"
#include "plan/plan.h"
#include "train/make_batch.h"

namespace bough {

struct ExecutorOptions {
  int64_t head_chunk_rows = 0;    // 0: by vocabulary and device (kernels/log_prob/log_prob_cost.h)
  bool verify_recompute = false;  // compare every recompute with its first forward, bit for bit
  // Runs of at least so many queries are attended by themselves
  // (kernels/tree_attention/tree_attention_segments.h); 0: kLeastRun where the device's vendor has a kernel
  // for them, else none.
  int64_t least_run = 0;
  bool same_bits = false;  // twice the same bits from the vendor's kernel, too
  // Tokens that are marked as drawn (mark_drawn) attend by choice, as generation under this policy does. On
  // the CPU.
  SparsePolicy sparse = {};
  // Where plans are of this rank's share of the batch, or the model of some of its layers (train/ranks.h,
  // TrainingRanks::walking()): values, loss and metrics are those of the whole batch on every rank, main_grad
  // holds the share's gradient. Not owned.
  Communicator* ranks = nullptr;
  // Of these, those that make every pass of one plan together (train/context_parallel.h); null: none does.
  Communicator* context_ranks = nullptr;
};

// CPU, accumulator type, one a loss row of the batch.
struct RowValues {
  at::Tensor log_probs_R, entropies_R;
  at::Tensor given_log_probs_RK;            // of batch.given_ids_RK; undefined where there are none
  at::Tensor top_ids_RK, top_log_probs_RK;  // the most likely tokens (int64), where they were asked for
};

struct WalkResult {
  double loss = 0;          // summed over blocks; its denominators are in the batch's weights
  WeightedSums metrics;     // the loss's
  RowValues values;         // of every row
  int64_t num_uploads = 0;  // copies of the walk's numbers to the device: at most one a pass
};

class BlockHead;

// Whether the loss of some block depends on rows that the block does not hold, so that a walk for values goes
// ahead of the one with gradients. Not where every pass holds what the loss couples: whole sequences, or the
// batch.
bool needs_values_first(const Plan& plan, const Loss& loss);

class Executor {
 public:
  explicit Executor(Model& model, ExecutorOptions options = {});

  // Adds the gradient of the loss over the whole batch to the parameters' main_grad. No trained token: loss
  // and gradients 0. The plan must be of batch.sequences.
  // `beside`: a head that reads the same hidden states in the walk that has gradients (head.h), or none.
  WalkResult forward_backward(const Plan& plan, const TrainBatch& batch, const Loss& loss,
                              BlockHead* beside = nullptr);

  // Walks the plan without backward, for log-probabilities and entropies alone, and for the `top_k` most
  // likely tokens where that is not 0.
  RowValues forward(const Plan& plan, const TrainBatch& batch, int64_t top_k = 0);

  // Walks the plan with another head in place of the policy's. backward: the gradient that the head returns
  // goes on into the parameters' main_grad; else each block is computed once, forward only.
  void walk(const Plan& plan, const TrainBatch& batch, BlockHead& head, bool backward);

 private:
  Model& model_;
  ExecutorOptions options_;
};

}  // namespace bough
