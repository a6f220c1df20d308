// Executes a plan: log-probabilities, loss and gradients of a batch, each tree token computed once
// (engine.md 3).
//
// Plan execution.
// - forward(b) of an interior block pushes its keys and values onto the prefix KV stack.
// - A leaf block runs forward, head, loss and backward directly one after another.
// - backward(b) of an interior block recomputes what was not kept, backpropagates and pops. Its gradients
//   come from its own loss, from the heads of descendant blocks and, through the anchors (tree_context.h),
//   from its rows of the prefix KV stack.
//
// Head. The log-probability of token t is computed in t's block, from the final hidden state of parent(t),
// which may lie in an ancestor block (a "boundary hidden state"). Only trained tokens are computed, in
// chunks, so that the logits [head rows, vocabulary] never exist as a whole.
//
// Pipeline stages (models/pipeline_stage.h). Each stage executes the same plan on its own layers, in the
// order of plan/pipeline_schedule.h. It receives hidden states from the previous stage and gradients from the
// next one. Only the last stage has heads, losses and boundary hidden states.
//
// Accumulates (+=): parameters' main_grad. Writes nothing else of the model.
#pragma once

#include <memory>
#include <optional>

#include "comm/communicator.h"
#include "kernels/page_choice/block_chooser.h"
#include "models/model.h"
#include "plan/plan.h"
#include "train/make_batch.h"

namespace bough {

struct ExecutorOptions {
  int64_t head_chunk_rows = 0;    // 0: by vocabulary and device (kernels/log_prob/log_prob_cost.h)
  bool verify_recompute = false;  // compare every recompute with its first forward, bit for bit
  // Runs of at least this many consecutive queries use a separate attention call
  // (kernels/tree_attention/tree_attention_segments.h). 0: kLeastRun if there is a kernel of the GPU's vendor
  // for such runs, otherwise one call computes all queries.
  int64_t least_run = 0;
  bool same_bits = false;  // gradients are deterministic: the GPU vendor's attention is not used
  // Page selection of tokens that are marked as sampled (mark_tokens), as in generation under this policy.
  // CPU only.
  SparsePolicy sparse = {};
  // Tokens with recorded experts (mark_tokens) use these instead of the router's choice. Other tokens, and
  // all tokens if false, use the router's choice.
  bool replays_experts = false;
  std::vector<RoutedExperts>* routed_experts = nullptr;  // ForwardRequest::routed_experts
  // Losses of a mixture's routers, whose gradients execute() adds to the loss's.
  RouterLossSettings router_losses = {};
  // Executor::expert_shares(). Undefined: execute() computes them if the load-balancing loss is used.
  at::Tensor expert_shares_E = {};
  // The ranks that compute the batch together (TrainingRanks::loss_group()), each with a shard of the batch
  // or of the layers. All ranks get outputs, loss and metrics of the whole batch. main_grad gets this rank's
  // part of the gradient. nullptr if this process computes the batch alone. Not owned.
  Communicator* ranks = nullptr;
  // The context-parallel process group, a subset of `ranks` (train/context_parallel.h). nullptr if context
  // parallelism is off.
  Communicator* context_ranks = nullptr;
};

// CPU, accumulator type. One entry per loss row of the batch.
struct RowValues {
  at::Tensor log_probs_R, entropies_R;
  at::Tensor top_k_log_probs_RK;            // of batch.top_k_ids_RK; undefined if the batch has none
  at::Tensor top_ids_RK, top_log_probs_RK;  // the policy's top-k tokens (int64); undefined unless requested
};

// Results of execute_forward() beside log-probabilities and entropies.
struct ForwardRequest {
  int64_t top_k = 0;  // above 0: the policy's top-k tokens
  // Set to the experts that a mixture used, by sequence, of all tokens up to the last trained one. The model
  // must not be divided among ranks.
  std::vector<RoutedExperts>* routed_experts = nullptr;
};

struct ExecutionResult {
  // Summed over plan blocks; the batch's weights contain the denominators. Losses of routers are not part of
  // it: they are the metrics experts/aux_loss and experts/z_loss, without their coefficients.
  double loss = 0;
  WeightedSums metrics;     // the loss's
  RowValues values;         // of every loss row
  int64_t num_uploads = 0;  // copies of index tensors to the device: at most one per pass
};

class BlockHead;
struct Seeds;

// Whether the loss of some plan block depends on loss rows of other blocks. If so, a forward-only plan
// execution first computes all log-probabilities, and then an execution with backward the gradients. False if
// every pass holds the loss's whole coupling scope: whole sequences, or the batch.
bool needs_values_first(const Plan& plan, const Loss& loss);

// A forward plan execution that holds the activations of the whole batch for its backward. Made by
// Executor::execute_held().
class HeldForward {
 public:
  virtual ~HeldForward() = default;
  const RowValues& values() const { return values_; }
  // Adds the gradient to main_grad and frees the activations. Call it at most once, with the weights of the
  // forward.
  virtual void backward(const Seeds& seeds) = 0;

 protected:
  RowValues values_;
};

class Executor {
 public:
  // Throws UserError if context ranks share the passes of a mixture of experts.
  explicit Executor(Model& model, ExecutorOptions options = {});

  // Adds the gradient of the loss over the whole batch to the parameters' main_grad. Without a trained token,
  // loss and gradients are 0. The plan must be made for batch.sequences.
  // beside: a second head (head.h) that runs in the gradient pass after the policy's head, or nullptr.
  // Throws UserError if a sequence exceeds the model's max_exact_length; so do the other two.
  ExecutionResult execute(const Plan& plan, const TrainBatch& batch, const Loss& loss,
                          BlockHead* beside = nullptr);

  // Executes the plan without backward. Computes log-probabilities, entropies and what is requested.
  RowValues execute_forward(const Plan& plan, const TrainBatch& batch, const ForwardRequest& request = {});

  // Adds the gradient of sum over loss rows of seed · value to main_grad, where the values are the
  // log-probabilities and entropies of execute_forward(). Computes the forward again.
  void add_gradient(const Plan& plan, const TrainBatch& batch, const Seeds& seeds);
  // The same in two steps without a second forward. The plan must have leaf blocks only (plan_execution.h).
  // plan, batch and model must outlive the result.
  std::unique_ptr<HeldForward> execute_held(const Plan& plan, const TrainBatch& batch);

  // The experts' shares of the choices of the whole batch: f in router_losses.h, fp64 [E], on the CPU.
  // Executes the plan without backward and without the policy's head.
  at::Tensor expert_shares(const Plan& plan, const TrainBatch& batch);

  // Executes the plan with `head` in place of the policy's head. backward: backpropagates the gradient that
  // `head` returns into main_grad. If false, each block is computed once, forward only.
  void execute_head(const Plan& plan, const TrainBatch& batch, BlockHead& head, bool backward);

 private:
  bool runs_values_first(const Plan& plan, const Loss& loss) const;

  Model& model_;
  const RouterLossSettings router_losses_;
  const ExecutorOptions options_;  // without router_losses
};

}  // namespace bough
