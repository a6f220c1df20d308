// The policy that a run generates with where it is not the one that it trains, and that is kept near it
// (DistillSparse, algorithm 1): low-rank adapters phi beside the trained weights theta, which the engine
// generates with under block-sparse attention. Theta is trained densely on those samples, by the run's loss
// and corrections. Then theta is frozen and phi takes one step on
//
//   L(phi) = L_PPO(sparse) + kl_loss_coef · KL(sparse, dense)
//
// over the same trees and trained tokens, through the sparse policy's own attention. The ratio of L_PPO is to
// phi's own values, detached: one update a batch. The KL is estimated from the sampled tokens, its target the
// dense log-probabilities from before theta's step (k2 by default: its gradient is the reverse KL's).
//
// Or a weak model of its own in phi's place (section 4.3): smaller, of the same tokenizer, all of it trained;
// it generates, densely or sparsely, and takes the same step on its samples.
//
// Several ranks that share the batch share phi's step as theta's: each walks its part of the rows, and the
// optimizer sums.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/settings.h"
#include "models/lora.h"
#include "report/metrics.h"
#include "train/gradient_step.h"
#include "train/optimizer.h"

namespace bough {

struct SparseTrainingSettings {
  std::string arm = "sparse";
  std::string weak_path;
  double kl_loss_coef = 0.001;
  std::string kl_loss_type = "k2";
  std::optional<double> lr_ratio;
  LoraSettings lora{.rank = 32};

  bool distills() const { return arm == "distill"; }
  bool is_weak() const { return arm == "weak"; }
  bool has_student() const { return distills() || is_weak(); }
  bool trains_sparse() const { return arm == "sparse_to_sparse"; }

  template <class V>
  void visit(V& v) {
    v("arm", arm,
      "with rollout.sparse: sparse (the dense policy is trained on sparse samples, nothing else), distill "
      "(as sparse, and adapters keep the policy that generates near it), sparse_to_sparse (the sparse policy "
      "itself is trained), exact_top_k (sparse, with rollout.sparse.summary: exact; a yardstick and slow); "
      "with "
      "or without it weak (another model generates, and is kept near the trained)",
      one_of({"sparse", "distill", "sparse_to_sparse", "exact_top_k", "weak"}));
    v("weak_path", weak_path, "weak: the model that generates, of the trained one's tokenizer");
    v("kl_loss_coef", kl_loss_coef,
      "distill, weak: weight of the KL from the policy that generates to the trained one", at_least(0.0));
    v("kl_loss_type", kl_loss_type, "distill, weak: estimator of that KL", one_of({"k1", "k2", "k3"}));
    v("lr_ratio", lr_ratio,
      "learning rate of what generates over actor.optimizer.lr; null: 5 of adapters, 1 of a weak model",
      above(0.0));
    v("lora", lora, "distill: the adapters");
  }
};

// Phi as PEFT's adapter, or a weak model as a Hugging Face directory `model`; and its optimizer.
struct SparseStudentSnapshot {
  std::shared_ptr<Model> model;
  bool is_adapter;
  OptimizerSnapshot optimizer;

  // In a folder of its own in the checkpoint: sparse_adapter or weak. `base`: the directory of the model that
  // theta began as; a weak model's has its tokenizer files.
  void save(const std::filesystem::path& checkpoint, const std::string& base) const;
};

class SparseStudent {
 public:
  // `theta` must outlive it; its weights are shared, not copied. `actor`: of the run, whose loss's clip,
  // aggregation, plans and optimizer are taken over. `ranks`: those that share the batch, each of which calls
  // what trains or snapshots; null: this process alone. Not owned.
  SparseStudent(Model& theta, const SparseTrainingSettings& settings, const ActorSettings& actor,
                const SparsePolicy& policy, int64_t total_steps, uint64_t seed,
                const TrainingRanks* ranks = nullptr);

  // A weak model. The rest: as above.
  SparseStudent(std::unique_ptr<Model> weak, const SparseTrainingSettings& settings,
                const ActorSettings& actor, const SparsePolicy& policy, int64_t total_steps,
                const TrainingRanks* ranks = nullptr);

  Model& model() { return *model_; }                     // theta with phi, or the weak one: what generates
  const ActorSettings& actor() const { return actor_; }  // of phi's step
  void use_costs(const PassCosts* costs) { gradient_->use_costs(costs); }

  // Phi's step. dense_log_probs_R: theta's before its own step, one a trained token of the rows, in
  // make_batch's order. Metrics sparse/* (docs/formats.md).
  MetricValues train(const std::vector<const Trajectory*>& rows, const at::Tensor& dense_log_probs_R,
                     const std::string& strategy);

  // copies: in tensors of its own, so that phi may be trained on while it is written. Of several ranks the
  // first one's is whole.
  SparseStudentSnapshot snapshot(bool copies) const;
  // Goes on from what a snapshot saved there, bit for bit.
  void load(const std::filesystem::path& checkpoint);

 private:
  SparseStudent(bool is_adapter, std::unique_ptr<Model> model, const SparseTrainingSettings& settings,
                const ActorSettings& actor, const SparsePolicy& policy, int64_t total_steps,
                const TrainingRanks* ranks);

  const ActorSettings actor_;
  const bool is_adapter_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<GradientStep> gradient_;
  std::unique_ptr<Optimizer> optimizer_;
};

}  // namespace bough
