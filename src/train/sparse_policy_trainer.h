// A second policy that samples for a run and is kept near the trained policy (DistillSparse, algorithm 1).
// theta: the trained policy's weights, with its adapters if lora trains them. phi: low-rank adapters on
// theta. The engine samples with theta and phi under block-sparse attention. A training step first trains
// theta densely on these samples, with the run's loss and corrections. Then theta is frozen and phi takes one
// optimizer step on
//
//   L(phi) = L_PPO(sparse) + kl_loss_coef · KL(sparse, dense)
//
// on the same trees and trained tokens, with sparse attention. L_PPO is ppo's policy term. pi_old is the
// current sparse policy, detached, because there is one update per batch. In synchronous runs this policy
// also sampled the batch. In asynchronous runs older weights sampled some tokens. Then L_PPO has the run's
// decoupled loss and corrections, with mu the recorded log-probabilities of generation: the factor corrects
// from mu to the current sparse policy. The target of the KL is the dense log-probabilities from before
// theta's update. It is estimated on the sampled tokens (default k2, whose gradient is the reverse KL's), or
// computed over the engine's top-k tokens and the rest (topk).
//
// A draft policy (`draft`, section 4.3) may take phi's place: a smaller model with the same tokenizer. All
// weights of the draft policy are trained. It samples, densely or sparsely, and takes the same optimizer
// step.
//
// Data-parallel ranks split the batch of phi's update as for theta's: each computes its shard, and the
// optimizer sums the gradients.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/lora.h"
#include "report/metrics.h"
#include "train/gradient_step.h"
#include "train/optimizer.h"
#include "train/settings.h"

namespace bough {

// The state that a checkpoint stores: phi as a PEFT adapter, or the draft policy as a Hugging Face directory
// `model`, and the optimizer's state.
struct SparsePolicySnapshot {
  std::shared_ptr<Model> model;
  bool is_adapter;
  OptimizerSnapshot optimizer;

  // Writes the folder sparse_adapter (adapters) or weak (draft policy) in the checkpoint. `base`: the
  // directory of theta's initial model; a draft policy's tokenizer files are copied from there.
  void save(const std::filesystem::path& checkpoint, const std::string& base) const;
};

// Arguments of the SparsePolicyTrainer's constructors, which copy them.
struct SparsePolicyOptions {
  const SparseTrainingSettings& settings;
  const ActorSettings& actor;  // the run's: clip, aggregation, plans and optimizer
  const SparsePolicy& policy;  // page selection
  int64_t total_steps;         // calls of update_weights() planned for the whole run
  // Whether older weights may have sampled tokens (rollout.max_head_offpolicyness above 0). If true, the step
  // has the run's corrections, and rows need the log-probabilities of generation.
  bool has_stale_samples = false;
  // nullptr if this process trains alone. Not owned. All ranks must be data parallel; otherwise the
  // constructors throw InternalError. update_weights() and snapshot() are then collective calls.
  const TrainingRanks* ranks = nullptr;
};

class SparsePolicyTrainer {
 public:
  // trained_model: theta. Must outlive this object, which uses its weights without a copy.
  // seed: of the adapters' initial weights.
  SparsePolicyTrainer(Model& trained_model, uint64_t seed, const SparsePolicyOptions& options);

  // With a draft policy.
  SparsePolicyTrainer(std::unique_ptr<Model> draft, const SparsePolicyOptions& options);

  Model& model() { return *model_; }                     // samples: theta with phi, or the draft policy
  const ActorSettings& actor() const { return actor_; }  // settings of phi's step
  void use_costs(const PassCosts* costs) { gradient_->use_costs(costs); }
  // As Trainer::set_version().
  void set_version(int64_t version) { gradient_->set_version(version); }

  // Takes phi's optimizer step. dense: theta's log-probabilities before theta's update, one per loss row, in
  // make_batch's order; with kl_loss_type topk also those of the engine's top-k tokens, [R, K]. Returns the
  // metrics sparse/* (docs/formats.md).
  MetricValues update_weights(const std::vector<const Trajectory*>& rows, const RowValues& dense,
                              const std::string& strategy);

  // copies: if true, copies the tensors, so that training may continue while they are written. With several
  // ranks, only rank 0's snapshot is complete.
  SparsePolicySnapshot snapshot(bool copies) const;
  // Restores what a snapshot saved in `checkpoint`, bit for bit.
  void load(const std::filesystem::path& checkpoint);

 private:
  SparsePolicyTrainer(bool is_adapter, std::unique_ptr<Model> model, const SparsePolicyOptions& options);

  const ActorSettings actor_;
  const bool is_adapter_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<GradientStep> gradient_;
  std::unique_ptr<Optimizer> optimizer_;
};

}  // namespace bough
