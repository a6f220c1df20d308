// One batch of scored trajectories to one update of the weights: plan, gradients, optimizer, one or several
// mini-batches, gone over once or several times (ppo_epochs). With several updates, pi_old is computed for
// the whole batch before the first. A critic learns from the same mini-batches: one with a backbone of its
// own in walks of its own, before the policy's; one that shares the actor's in the policy's walk.
//
// Several ranks (ranks.h) have a trainer each, of the same weights and settings. Rank 0 calls train(), which
// sends the batch to the others, which are in follow(); all take the step together.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "report/metrics.h"
#include "train/acceptance.h"
#include "train/critic.h"
#include "train/gradient_step.h"
#include "train/optimizer.h"
#include "train/ranks.h"
#include "train/run_checkpoint.h"
#include "train/settings.h"
#include "train/sparse_student.h"

namespace bough {

// What a step is predicted to cost on this device; the room `cost` knows it.
struct StepCosts {
  std::shared_ptr<const PassCosts> passes;  // none: plans are made without
  WorkModel work;
  double matrix_product_rate = 0;  // FLOP/s of the device; 0: not known
};

// All that a checkpoint has of training.
struct TrainingSnapshot {
  std::shared_ptr<Model> model;  // whole
  OptimizerSnapshot optimizer;
  std::optional<CriticSnapshot> critic;
  std::optional<SparseStudentSnapshot> student;
  std::shared_ptr<Model> reference;  // where it is renewed; else null
  Json coefficients;                 // GradientStep::state()

  // What stands beside model and optimizer. `base`: the directory of the model that the run began with.
  void save_more(const std::filesystem::path& directory, const std::string& base) const;
};

class BatchTrainer {
 public:
  virtual ~BatchTrainer() = default;

  // Updates the weights from sequences that have an advantage; those that are not trained take no part in
  // anything. Metrics under the names of docs/formats.md. A batch without a trained token changes nothing.
  virtual MetricValues train(const std::vector<Trajectory>& batch) = 0;

  // Gives the sequences that are trained the critic's values (sequence_steps.h), which advantages are made
  // of; nothing where there is no critic.
  virtual void set_values(std::vector<Trajectory>&) {}

  // Gives the sequences that are trained the acceptance of each token by the policy (acceptance.h), which
  // actor.keep_samples_by: acceptance selects by: a walk over all of them.
  virtual void set_acceptance(std::vector<Trajectory>&) {}

  // The trainer's version i from now on: how many batches it has been trained on. To be said before train()
  // where a token's age counts.
  virtual void set_version(int64_t) {}
};

class Trainer final : public BatchTrainer {
 public:
  // model, what the loss needs of `frozen`, and critic where there is one, must outlive it. `total_steps`:
  // calls of train() planned for the whole run, which the learning rate's schedule follows; the actor's
  // begins after the critic's warm-up. `sparse`: what the model attends by, where a sparse policy is trained.
  // `student`: the policy that drew the samples, which takes its own step after the model's.
  Trainer(Model& model, FrozenModels frozen, const ActorSettings& settings, int64_t total_steps,
          const Clock& clock, Critic* critic = nullptr, const SparsePolicy& sparse = {},
          SparseStudent* student = nullptr, const TrainingRanks* ranks = nullptr);

  // Of rank 0 where there are several; its metrics are of all of them.
  MetricValues train(const std::vector<Trajectory>& batch) override;
  void set_values(std::vector<Trajectory>& batch) override;
  void set_acceptance(std::vector<Trajectory>& batch) override;
  void set_version(int64_t version) override {
    gradient_.set_version(version);
    num_batches_ = version;
  }

  // What plans are made from; without it `auto` is `blocks` with passes of B tokens. `critic`: of a critic's
  // own backbone.
  void use_costs(StepCosts costs, StepCosts critic = {});
  const PassCosts* pass_costs() const { return whole_passes_.get(); }  // of one rank alone

  // Says with each batch how far the policy that drew the samples and the trained one are apart
  // (acceptance_metrics): for samples of another policy, as a sparse one's.
  void measure_acceptance() {
    measures_acceptance_ = true;
    gradient_.ask_for_engine_top();
  }

  // Of the other ranks: does what rank 0's trainer does until that calls end_ranks(). `publish`, if any, is
  // called where rank 0's calls publish_ranks().
  void follow(const std::function<void(int32_t version)>& publish = {});
  void publish_ranks(int32_t version);
  void end_ranks();

  // Of rank 0 where ranks share the layers: a model of the whole, whose weights whole_model() sets. It must
  // outlive the trainer.
  void use_whole(Model& whole) { whole_ = &whole; }
  // Rank 0's, of all ranks: the trained model as it is now.
  Model& whole_model();

  // Rank 0's, of all ranks. copies: in tensors of its own, so that training may go on while it is written.
  TrainingSnapshot snapshot(bool copies);
  // Goes on from a checkpoint, bit for bit: every rank reads it. Returns what the run gave to save with it.
  // UserError as load_run_checkpoint().
  Json load(const RunCheckpoint& checkpoint);

  Optimizer& optimizer() { return optimizer_; }
  GradientStep& gradient() { return gradient_; }

 private:
  // A mini-batch and what is made of it once, however often it is gone over.
  struct MiniBatch {
    TrainBatch batch;
    std::optional<Plan> plan, critic_plan;
    RowValues before;  // of the policy before the first update, where somebody asks for them
  };
  // What the updates of one batch add up to.
  struct Updates {
    WeightedSums sums;  // metrics of the walks
    double gradient_seconds = 0, critic_seconds = 0;
    Optimizer::Report last = {}, last_of_critic = {};
    double grad_norm = 0, critic_grad_norm = 0;  // sums
    int64_t count = 0;
  };
  MetricValues train_together(const std::vector<Trajectory>& batch);
  TrainingSnapshot snapshot_together(bool copies);
  Model* gather_whole();
  Model* renewed_reference() const { return settings_.loss.ref_model_sync_steps > 0 ? reference_ : nullptr; }
  bool leads_ranks() const { return ranks_ && ranks_->leads(); }
  void update(MiniBatch& mini, bool trains_actor, Updates& updates);
  // Of several ranks: rank 0 has the others walk these rows with it.
  void order_walk(RankOrder::Kind kind, const std::vector<Trajectory*>& rows);
  void update_critic(MiniBatch& mini, Updates& updates);
  bool keeps_log_probs() const { return student_ || measures_acceptance_; }
  MetricValues follow_up(const std::vector<const Trajectory*>& rows,
                         const std::vector<std::vector<int64_t>>& members,
                         const std::vector<MiniBatch>& minis);

  const ActorSettings settings_;
  Critic* critic_;
  SparseStudent* student_;
  Model* const reference_;
  Model& model_;
  Model* whole_ = nullptr;
  const TrainingRanks* const ranks_;  // null: this process alone
  GradientStep gradient_;
  Optimizer optimizer_;
  const Clock& clock_;
  StepCosts costs_, critic_costs_;  // of a pass each rank's part
  std::shared_ptr<const PassCosts> whole_passes_;
  bool measures_acceptance_ = false;
  int64_t num_batches_ = 0;        // trained on so far
  double values_seconds_ = 0;      // of set_values since the last train()
  double acceptance_seconds_ = 0;  // of set_acceptance since then
};

// Metrics of a batch's tree: what it shares, and what the plans compute of it (AReaL's tree_token_ratio,
// under its name) and compute again. With a cost model, also what they were predicted to take over the
// `seconds` they took. Of several ranks, each with its own plans, what they compute together.
MetricValues tree_metrics(const PrefixTree& tree, const std::vector<const Plan*>& plans,
                          const PassCosts* costs = nullptr, double seconds = 0,
                          const TrainingRanks* ranks = nullptr);

}  // namespace bough
