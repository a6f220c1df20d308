// The gradient of a batch under a run's settings, and how long it takes: what the trainer, `bough step`,
// `bough bench step` and a run's comparison with dense share.
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
#include "train/ranks.h"

namespace bough {

// Models that a step reads and does not train: what a caller has of them.
struct FrozenModels {
  Model* reference = nullptr;  // of the KL terms; renewed where ref_model_sync_steps says so
  Model* teacher = nullptr;

  FrozenModels(Model* reference_model = nullptr, Model* teacher_model = nullptr)
      : reference(reference_model), teacher(teacher_model) {}
};

// pi_old (algorithms.md): where the batch is one update it is the current policy, detached, and costs
// nothing; else its log-probabilities are computed once, in prepare(), and stay. Where the loss takes it from
// the engine (recompute_logprob: false), it is the behaviour policy; where it interpolates (prox_logp_method:
// loglinear), it takes no walk either. A KL in the reward and a teacher's topk take one all the same: both
// look at the policy of the start before there is a gradient.
//
// Reference and teacher walk forward only, by plans of the same batch.
class GradientStep {
 public:
  // All arguments must outlive the object. `costs`: what plans are made from, or null. UserError: the
  // settings need a model that is not there, or contradict each other.
  // `ranks`: a group that takes the step together, each its share of every batch; all must call alike, with
  // the same weights, batch and costs. Null: this process alone. Not owned.
  // `sparse`: what attends by choice, as in generation, in all walks; dense by default.
  GradientStep(Model& model, FrozenModels frozen, const ActorSettings& settings, const PassCosts* costs,
               const TrainingRanks* ranks = nullptr, const SparsePolicy& sparse = {});

  // The rows of the batch, without what takes a walk.
  TrainBatch rows_of(const std::vector<const Trajectory*>& trajectories) const;
  // All that the loss needs and that does not change while the batch is trained on. `strategy`: of the walks
  // that it takes. UserError: the loss needs versions that the trajectories do not have; pi_old is to be the
  // training pass's own where there are several updates.
  TrainBatch prepare(const std::vector<const Trajectory*>& trajectories, bool is_one_update,
                     const std::string& strategy);
  // On a GPU within what is free of it where the settings bound nothing: as it was found before the first
  // plan.
  Plan plan(const TrainBatch& batch, const std::string& strategy) const;
  // The policy's values as its weights are, one a row.
  RowValues values(const TrainBatch& batch, const std::string& strategy) {
    return executor_.forward(plan(batch, strategy), batch);
  }
  // Batches that prepare() makes ask their walks for the engine's most likely tokens, too, wherever every
  // trained token has some, whether the loss reads them or not.
  void ask_for_engine_top() { asks_for_engine_top_ = true; }
  // Adds the gradient to the parameters' main_grad, which must be 0 where there are several ranks; it is
  // there when this returns. `beside`: another head over the same walk, or none; of several ranks it
  // sees its own rows alone.
  WalkResult accumulate(const Plan& plan, const TrainBatch& batch, BlockHead* beside = nullptr);

  // accumulate() leaves each rank its own part of the gradient: the optimizer sums them.
  void leave_sums_over_ranks() { sums_gradients_ = false; }

  // What follows the last optimizer step of a batch: coefficients move, and the reference is renewed where it
  // is its turn. `sums`: metrics of the walks. Returns the metrics of that.
  MetricValues finish(const WeightedSums& sums);

  // Coefficients that move, for a run's checkpoint; null where none does.
  Json state() const;
  void restore(const Json& state);

  // The trainer's version i: of the batches trained on so far. Where nobody says it, the newest version in
  // the batch, as if nothing had been trained on since.
  void set_version(int64_t version) { version_ = version; }

  const PassCosts* costs() const { return costs_; }
  void use_costs(const PassCosts* costs) { costs_ = costs; }

 private:
  WalkResult accumulate_shares(const Plan& plan, const TrainBatch& batch);
  Plan plan_shares(const PlanRequest& request, const std::string& strategy) const;
  void set_given_tokens(const std::vector<const Trajectory*>& trajectories, TrainBatch& batch) const;
  void penalise_kl(TrainBatch& batch, const at::Tensor& old_log_probs_R);
  std::optional<int64_t> device_bytes() const;
  Executor executor_of(Model& model) const {
    return Executor(model, {.same_bits = settings_.deterministic,
                            .sparse = sparse_,
                            .ranks = ranks_ ? ranks_->walking() : nullptr,
                            .context_ranks = ranks_ ? ranks_->context() : nullptr});
  }
  // Those that have the same pieces of the model, or null.
  Communicator* sharing() const { return ranks_ ? ranks_->sharing() : nullptr; }

  Model& model_;
  const FrozenModels frozen_;
  const ActorSettings settings_;
  const PassCosts* costs_;
  const TrainingRanks* const ranks_;  // null: this process alone
  bool sums_gradients_ = true;
  const SparsePolicy sparse_;
  mutable std::optional<int64_t> device_bytes_;  // of a GPU, for plans
  std::optional<int64_t> version_;
  bool asks_for_engine_top_ = false;
  std::unique_ptr<Loss> loss_;
  Executor executor_;
  KlController kl_controller_;
  EntropyController entropy_controller_;
  WeightedSum kl_in_reward_;  // over the sequences of the batch that is trained on
  int64_t num_finished_ = 0;
};

// Repetitions of one batch's gradient. Weights stay as they are; main_grad holds the last repetition's
// gradient.
class StepTimer {
 public:
  // All arguments must outlive the timer. Allocates the gradients.
  StepTimer(Model& model, FrozenModels frozen, const ActorSettings& settings, const PassCosts* costs,
            const std::vector<Trajectory>& batch, const std::string& strategy,
            const TrainingRanks* ranks = nullptr);

  // Times one step from the trajectories to the gradient, planning included; of several ranks until the last
  // has it.
  void run(bool counted);

  const std::vector<double>& seconds() const { return seconds_; }  // of the counted runs, in order
  double median_seconds() const;
  int64_t peak_bytes() const { return peak_bytes_; }  // over weights and gradients; of all runs
  double loss() const { return loss_; }
  int64_t num_trained() const { return num_trained_; }
  const std::string& strategy() const { return strategy_; }             // what was taken
  int64_t max_tokens_per_pass() const { return max_tokens_per_pass_; }  // of the plan taken
  const Simulation& simulation() const { return simulation_; }

 private:
  Model& model_;
  const TrainingRanks* const ranks_;
  const std::shared_ptr<const PassCosts> costs_;  // of this rank
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
