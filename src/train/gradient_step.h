// Computes the gradient of a batch under a run's settings (GradientStep), and measures its time (StepTimer).
// Used by the trainer, `bough step`, `bough bench step` and a run's comparison with the strategy `dense`.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "algo/controllers.h"
#include "base/json.h"
#include "report/metrics.h"
#include "train/executor.h"
#include "train/make_batch.h"
#include "train/parallel_groups.h"
#include "train/pass_memory.h"

namespace bough {

// Models that a training step reads and does not train. nullptr if the caller has no such model.
struct FrozenModels {
  Model* reference = nullptr;  // for the KL terms; finish() updates its weights if ref_model_sync_steps > 0
  Model* teacher = nullptr;

  FrozenModels(Model* reference_model = nullptr, Model* teacher_model = nullptr)
      : reference(reference_model), teacher(teacher_model) {}
};

// Source of the log-probabilities of pi_old (algorithms.md), the first that applies:
// - use_decoupled_loss and recompute_logprob are false: mu, from the engine;
// - use_decoupled_loss with prox_logp_method loglinear: interpolated, without a forward plan execution;
// - one optimizer step per batch: the current policy, detached, at no cost;
// - otherwise: a forward plan execution in prepare_batch(), before the first optimizer step.
// A KL in the reward, and the teacher's loss_mode topk (K most likely tokens of the policy), need this
// execution in any case.
//
// Reference and teacher run forward only, with plans of the same batch.
class GradientStep {
 public:
  // All arguments must outlive the object. Throws UserError if the settings need a model that is nullptr, or
  // contradict each other.
  // costs: for the planner. nullptr if plans are made without costs.
  // ranks: nullptr if this process trains alone. Otherwise all ranks must make the same calls, with the same
  // weights, batch and costs. Each rank computes its shard of the batch.
  // sparse: page selection of sampled tokens, as in generation. The default is dense attention.
  GradientStep(Model& model, FrozenModels frozen, const ActorSettings& settings, const PassCosts* costs,
               const TrainingRanks* ranks = nullptr, const SparsePolicy& sparse = {});

  // The trajectories as a batch, without the fields that need a plan execution.
  TrainBatch rows_of(const std::vector<const Trajectory*>& trajectories);
  // The batch with all fields that the loss needs and that stay fixed during the batch's updates. `strategy`:
  // for the plans of forward executions. Throws UserError if the loss needs versions or engine top-k tokens
  // that the trajectories lack, or if prox_logp_method is reuse_train_logp and the batch has several updates.
  // reference: log-probabilities of the reference model at the sampled and the engine's top-k tokens, if the
  // caller has them. Without them the reference model is executed when the loss needs it.
  TrainBatch prepare_batch(const std::vector<const Trajectory*>& trajectories, bool is_one_update,
                           const std::string& strategy, const RowValues& reference = {});
  // Plans this rank's shard. If there are costs, on a GPU and without a configured memory bound, the plan
  // fits into 90% of the memory that was free before the first plan.
  Plan plan(const TrainBatch& batch, const std::string& strategy) const;
  // Log-probabilities and entropies of the policy with its current weights, one per loss row.
  RowValues values(const TrainBatch& batch, const std::string& strategy) {
    return executor_.execute_forward(plan(batch, strategy), batch);
  }
  // The KL in the reward at each loss row: -kl_ctl · KL(policy, reference), with the current weights. [R].
  // finish() covers these rows. Only if ActorSettings::has_kl_rewards().
  at::Tensor kl_rewards(const TrainBatch& batch, const std::string& strategy);
  // From now on, if every trained token of a batch has top-k tokens of the engine, prepare_batch() sets them
  // in the batch. Plan executions then return their log-probabilities, even if the loss does not read them.
  void ask_for_engine_top() { asks_for_engine_top_ = true; }
  // Adds the gradient to the parameters' main_grad, which must be 0 before if there are several ranks. Waits
  // for the GPU. `beside`: a second head, which gets only this rank's loss rows, or nullptr.
  ExecutionResult add_gradient(const Plan& plan, const TrainBatch& batch, BlockHead* beside = nullptr);

  // From now on add_gradient() does not sum gradients over ranks. The optimizer sums them.
  void leave_sums_over_ranks() { sums_gradients_ = false; }

  // Call after the last optimizer step of a batch. Updates the adaptive coefficients from `sums`, the metrics
  // of the plan executions. Updates the reference model every ref_model_sync_steps batches. Returns metrics.
  MetricValues finish(const WeightedSums& sums);

  // Adaptive coefficients for a run's checkpoint. JSON null if all coefficients are constant.
  Json state() const;
  void restore(const Json& state);

  // Sets the trainer's version: the number of batches trained on so far. If never called, the newest version
  // in the batch is used.
  void set_version(int64_t version) { version_ = version; }

  const PassCosts* costs() const { return costs_; }
  void use_costs(const PassCosts* costs) { costs_ = costs; }

 private:
  ExecutionResult add_gradient_by_shares(const Plan& plan, const TrainBatch& batch);
  Plan plan_shards(const PlanRequest& request, const std::string& strategy) const;
  void check_routed_experts(const std::vector<const Trajectory*>& trajectories) const;
  void replay_own_experts(const std::vector<const Trajectory*>& trajectories,
                          std::vector<RoutedExperts> routed, TrainBatch& batch) const;
  void set_top_k_tokens(const std::vector<const Trajectory*>& trajectories, TrainBatch& batch) const;
  at::Tensor kl_in_reward(const TrainBatch& batch, const at::Tensor& old_log_probs_R,
                          const at::Tensor& reference_log_probs_R);
  // Frozen models (the reference, the teacher) choose their own experts, and their routers have no losses.
  ExecutorOptions options_of(const Model& model) const {
    const bool is_policy = &model == &model_;
    return {.same_bits = settings_.deterministic,
            .sparse = sparse_,
            .replays_experts = is_policy && settings_.routing_replay != "none",
            .router_losses = is_policy ? settings_.router_losses : RouterLossSettings(),
            .ranks = ranks_ ? ranks_->loss_group() : nullptr,
            .context_ranks = ranks_ ? ranks_->context() : nullptr};
  }
  Executor executor_of(Model& model) const { return Executor(model, options_of(model)); }
  // The ranks with the same shard of the model, or nullptr.
  Communicator* data_parallel_group() const { return ranks_ ? ranks_->data_parallel_group() : nullptr; }

  Model& model_;
  const FrozenModels frozen_;
  const ActorSettings settings_;
  const PassCosts* costs_;
  const TrainingRanks* const ranks_;  // nullptr if this process trains alone
  bool sums_gradients_ = true;
  const SparsePolicy sparse_;
  const PassMemory pass_memory_;
  std::optional<int64_t> version_;
  bool asks_for_engine_top_ = false;
  std::unique_ptr<Loss> loss_;
  Executor executor_;
  KlController kl_controller_;
  EntropyController entropy_controller_;
  RouteDifferences route_differences_;  // of the current batch; finish() resets it
  WeightedSum kl_in_reward_;            // over the sequences of the current batch; finish() resets it
  int64_t num_finished_ = 0;
};

// Times repetitions of one batch's gradient. Weights do not change. main_grad holds the last repetition's
// gradient.
class StepTimer {
 public:
  struct Options {
    std::string strategy;                  // of the plans
    const PassCosts* costs = nullptr;      // GradientStep
    const TrainingRanks* ranks = nullptr;  // GradientStep
  };
  // All arguments must outlive the timer. Allocates the gradients.
  StepTimer(Model& model, FrozenModels frozen, const ActorSettings& settings,
            const std::vector<Trajectory>& batch, const Options& options);

  // Times one gradient computation from the trajectories, planning included. With several ranks, the time
  // ends when this rank has the summed gradient. counted: false for a warm-up run.
  void run(bool counted);

  const std::vector<double>& seconds() const { return seconds_; }  // one per counted run, in order
  double median_seconds() const;
  int64_t peak_bytes() const { return peak_bytes_; }  // beyond weights and gradients; maximum of all runs
  double loss() const { return loss_; }
  int64_t num_trained() const { return num_trained_; }
  const std::string& strategy() const { return strategy_; }             // of the last plan
  int64_t max_tokens_per_pass() const { return max_tokens_per_pass_; }  // of the last plan
  const Simulation& simulation() const { return simulation_; }

 private:
  Model& model_;
  const TrainingRanks* const ranks_;
  const std::shared_ptr<const PassCosts> costs_;  // of this rank's part of a pass
  GradientStep step_;
  std::vector<const Trajectory*> batch_;
  const std::string asked_strategy_;
  std::vector<double> seconds_;
  int64_t peak_bytes_ = 0;
  double loss_ = 0;
  int64_t num_trained_ = 0;
  std::string strategy_;
  int64_t max_tokens_per_pass_ = 0;
  Simulation simulation_;
};

}  // namespace bough
