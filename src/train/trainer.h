// Updates the weights from one batch of scored trajectories: plans, gradients and optimizer steps, for each
// mini-batch and epoch (ppo_epochs). With several updates per batch, pi_old is computed for the whole batch
// before the first update. A critic learns from the same mini-batches. A critic with its own backbone has its
// own plan executions, before the policy's. A critic with the actor's backbone uses the policy's plan
// executions.
//
// With several ranks (parallel_groups.h), each rank has a trainer with the same settings. Rank 0 calls
// train_step(), which sends the batch to all other ranks. These wait in follow() and execute the same steps.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "kernels/common/device.h"
#include "report/metrics.h"
#include "train/acceptance.h"
#include "train/critic.h"
#include "train/gradient_step.h"
#include "train/optimizer.h"
#include "train/parallel_groups.h"
#include "train/run_checkpoint.h"
#include "train/settings.h"
#include "train/sparse_policy_trainer.h"

namespace bough {

// Predicted costs of a training step on this device. The module `cost` makes them.
struct StepCosts {
  std::shared_ptr<const PassCosts> passes;  // nullptr: plans are made without costs
  WorkModel work;
  double matrix_product_rate = 0;  // FLOP/s of the device; 0: not known
};

// The training state that a checkpoint stores. With several ranks, only rank 0's is complete.
struct TrainingSnapshot {
  std::shared_ptr<Model> model;  // unsharded
  OptimizerSnapshot optimizer;
  std::optional<CriticSnapshot> critic;
  std::optional<SparsePolicySnapshot> sparse_trainer;
  std::shared_ptr<Model> reference;  // nullptr unless ref_model_sync_steps > 0
  Json coefficients;                 // GradientStep::state()

  // Saves everything except model and optimizer. `base`: the directory of the run's initial model.
  void save_more(const std::filesystem::path& directory, const std::string& base) const;
};

class BatchTrainer {
 public:
  virtual ~BatchTrainer() = default;

  // Updates the weights from sequences that have an advantage. Sequences that are not trained are ignored. A
  // batch without a trained token changes no weights. Returns the metrics of docs/formats.md.
  virtual MetricValues train_step(const std::vector<Trajectory>& batch) = 0;

  // Sets the critic's values and the KL's rewards of the trained sequences (sequence_steps.h), from which
  // advantages are computed. Does nothing if the estimator needs neither.
  virtual void set_values(std::vector<Trajectory>&) {}

  // Sets each token's acceptance by the trained policy (acceptance.h) for the trained sequences. Needed for
  // actor.keep_samples_by: acceptance. Costs one forward plan execution.
  virtual void set_acceptance(std::vector<Trajectory>&) {}

  // Sets the columns kMismatchColumn and kEntropyColumn of the rows that the last train_step() trained, which
  // must be those of `batch`. Does nothing unless the trainer was asked to keep them.
  virtual void set_token_values(std::vector<Trajectory>&) {}

  // Sets the trainer's version: the number of batches trained on so far. Must be called before train_step()
  // if token ages matter.
  virtual void set_version(int64_t) {}

  // The most bytes in use so far on the device that trains (peak_memory_bytes()).
  virtual int64_t peak_bytes() const = 0;
};

// The optional parts of a run that trains. The objects must outlive the trainer.
struct TrainerOptions {
  Critic* critic = nullptr;                       // nullptr if the run has no critic
  SparsePolicy sparse = {};                       // page selection, if a sparse policy is trained
  SparsePolicyTrainer* sparse_trainer = nullptr;  // the policy that samples, updated after the model; nullptr
                                                  // if the model samples
  const TrainingRanks* ranks = nullptr;           // nullptr if this process trains alone
};

class Trainer final : public BatchTrainer {
 public:
  // model, the models in `frozen` and clock must outlive the trainer.
  // total_steps: calls of train_step() planned for the whole run, for the learning rate schedule. The actor's
  // schedule begins after the critic's warm-up.
  Trainer(Model& model, FrozenModels frozen, const ActorSettings& settings, int64_t total_steps,
          const Clock& clock, const TrainerOptions& options = {});

  // With several ranks only rank 0 may call train_step(), set_values() and set_acceptance(). The metrics of
  // train_step() cover all ranks.
  MetricValues train_step(const std::vector<Trajectory>& batch) override;
  void set_values(std::vector<Trajectory>& batch) override;
  void set_acceptance(std::vector<Trajectory>& batch) override;
  void set_token_values(std::vector<Trajectory>& batch) override;
  int64_t peak_bytes() const override { return peak_memory_bytes(model_.device()); }
  void set_version(int64_t version) override {
    gradient_.set_version(version);
    if (sparse_trainer_) sparse_trainer_->set_version(version);
    num_batches_ = version;
  }

  // Sets the costs for the planner. Without costs, the plan strategy `auto` means `blocks` with passes of at
  // most max_tokens_per_mb tokens. `critic`: costs for the critic's own backbone.
  void use_costs(StepCosts costs, StepCosts critic = {});
  const PassCosts* pass_costs() const { return whole_passes_.get(); }  // of a whole pass on one rank

  // From now on train_step() also returns acceptance_metrics: the distance between the policy that sampled
  // and the trained policy. Useful if these differ in more than version, for example by sparse attention.
  void measure_acceptance() {
    measures_acceptance_ = true;
    gradient_.ask_for_engine_top();
  }

  // From now on set_token_values() has an effect. No effect with several ranks, each of which has a part of
  // the values.
  void keep_token_values() { keeps_token_values_ = ranks_ == nullptr; }

  // Called by ranks other than 0. Executes rank 0's commands until rank 0 calls end_ranks(). `publish`, if
  // set, is called when rank 0 calls publish_ranks().
  void follow(const std::function<void(int32_t version)>& publish = {});
  void publish_ranks(int32_t version);
  void end_ranks();

  // Called by rank 0 if ranks shard the model: sets the unsharded model that unsharded_model() fills. `whole`
  // must outlive the trainer.
  void use_unsharded(Model& whole) { whole_ = &whole; }
  // Called by rank 0: gathers the current weights from all ranks and returns the unsharded model. If ranks
  // shard the model, throws InternalError on other ranks, and if use_unsharded() was not called.
  Model& unsharded_model();

  // Called by rank 0: gathers the state of all ranks. copies: if true, copies the tensors, so that training
  // may continue while they are written.
  TrainingSnapshot snapshot(bool copies);
  // Restores a checkpoint, bit for bit. Every rank calls this and reads the files. Returns the controller's
  // state that was saved with the checkpoint. Throws as load_run_checkpoint().
  Json load(const RunCheckpoint& checkpoint);

  // Returns why snapshot() would not give the state at the end of the step with this number. Empty if it
  // would. For a run that an exception ended: until the first update of a step, its weights are those of the
  // step before.
  std::string why_not_at(int64_t step) const;

  Optimizer& optimizer() { return optimizer_; }
  GradientStep& gradient() { return gradient_; }

 private:
  // A mini-batch with its plans, which are made once for all epochs.
  struct MiniBatch {
    std::vector<int64_t> members;  // its sequences, by index in StepState::kept
    TrainBatch batch;
    std::optional<Plan> plan, critic_plan;
    bool has_stored_values = false;  // store_token_values()
    RowValues before;                // the policy's outputs before the first update, if keeps_log_probs()
  };
  // Sums over the updates of one batch.
  struct Updates {
    WeightedSums sums;  // metrics of the plan executions
    double gradient_seconds = 0, critic_seconds = 0;
    Optimizer::Report last = {}, last_of_critic = {};
    double grad_norm = 0, critic_grad_norm = 0;  // sums
    int64_t count = 0;
  };
  // The state of one training step.
  struct StepState {
    std::vector<const Trajectory*> kept;  // the batch's trained sequences
    bool trains_actor = true;             // false during the critic's warm-up
    std::vector<MiniBatch> minis;
    Updates updates;
  };
  MetricValues train_step_on_rank(const std::vector<Trajectory>& batch);
  MetricValues update_on(const std::vector<Trajectory>& batch);
  void prepare_mini_batches(StepState& step);
  void add_update_metrics(const StepState& step, MetricValues& values);
  void add_plan_metrics(const StepState& step, const PrefixTree& tree, MetricValues& values);
  void add_speed_metrics(const StepState& step, const PrefixTree& tree, double seconds, MetricValues& values);
  TrainingSnapshot snapshot_on_rank(bool copies);
  Model* gather_unsharded();
  Model* renewed_reference() const { return settings_.loss.ref_model_sync_steps > 0 ? reference_ : nullptr; }
  bool is_rank_zero() const { return ranks_ && ranks_->is_rank_zero(); }
  void update_weights(StepState& step, MiniBatch& mini);
  // On rank 0: commands all other ranks to compute `rows` together with rank 0.
  void order_execution(RankOrder::Kind kind, const std::vector<Trajectory*>& rows);
  void set_kl_rewards(const std::vector<Trajectory*>& rows);
  void add_critic_gradient(MiniBatch& mini, Updates& updates);
  void store_token_values(const StepState& step, const MiniBatch& mini, const RowValues& values);
  bool keeps_log_probs() const { return sparse_trainer_ || measures_acceptance_; }
  MetricValues follow_up(const StepState& step);

  const ActorSettings settings_;
  Critic* critic_;
  SparsePolicyTrainer* sparse_trainer_;
  Model* const reference_;
  Model& model_;
  Model* whole_ = nullptr;
  const TrainingRanks* const ranks_;  // nullptr if this process trains alone
  GradientStep gradient_;
  Optimizer optimizer_;
  const Clock& clock_;
  StepCosts costs_, critic_costs_;  // of one rank's part of a pass
  std::shared_ptr<const PassCosts> whole_passes_;
  bool measures_acceptance_ = false, keeps_token_values_ = false;
  // The last train_step()'s log-probabilities before the step, and entropies, of a row's trained tokens.
  struct TokenValues {
    const Trajectory* row;            // of the batch of train_step()
    at::Tensor log_probs, entropies;  // CPU, fp32
  };
  std::vector<TokenValues> token_values_;
  int64_t num_batches_ = 0;  // trained on so far
  // The step whose weights and optimizer state the trainer holds. nullopt: a step has changed some of them
  // and is not complete.
  std::optional<int64_t> complete_step_ = 0;
  // Time since the last train_step(): of the critic's values, and of other forward executions before it.
  double values_seconds_ = 0, scoring_seconds_ = 0;
};

}  // namespace bough
