// The sparse policy that a run generates with, kept near the dense one that it trains (DistillSparse,
// algorithm 1): low-rank adapters phi beside the trained weights theta, which the engine generates with under
// block-sparse attention. Theta is trained densely on those samples, by the run's loss and corrections. Then
// theta is frozen and phi takes one step on
//
//   L(phi) = L_PPO(sparse) + kl_loss_coef · KL(sparse, dense)
//
// over the same trees and trained tokens, through the sparse policy's own attention. The ratio of L_PPO is to
// phi's own values, detached: one update a batch. The KL is estimated from the sampled tokens, its target the
// dense log-probabilities from before theta's step (k2 by default: its gradient is the reverse KL's).
#pragma once

#include <filesystem>
#include <memory>
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
  double kl_loss_coef = 0.001;
  std::string kl_loss_type = "k2";
  double lr_ratio = 5;
  LoraSettings lora{.rank = 32};

  bool distills() const { return arm == "distill"; }
  bool trains_sparse() const { return arm == "sparse_to_sparse"; }

  template <class V>
  void visit(V& v) {
    v("arm", arm,
      "with rollout.sparse: sparse (the dense policy is trained on sparse samples, nothing else), distill "
      "(and "
      "adapters keep the sparse policy near it), sparse_to_sparse (the sparse policy itself is trained), "
      "exact_top_k (sparse, with rollout.sparse.summary: exact; a yardstick and slow)",
      one_of({"sparse", "distill", "sparse_to_sparse", "exact_top_k"}));
    v("kl_loss_coef", kl_loss_coef, "distill: weight of the KL from the sparse to the dense policy",
      at_least(0.0));
    v("kl_loss_type", kl_loss_type, "distill: estimator of that KL", one_of({"k1", "k2", "k3"}));
    v("lr_ratio", lr_ratio, "distill: learning rate of the adapters over actor.optimizer.lr", above(0.0));
    v("lora", lora, "distill: the adapters");
  }
};

// Phi as PEFT's adapter, and its optimizer.
struct SparseStudentSnapshot {
  std::shared_ptr<Model> model;
  OptimizerSnapshot optimizer;

  // `base`: the directory or name of the model that theta began as.
  void save(const std::filesystem::path& directory, const std::string& base) const;
};

class SparseStudent {
 public:
  // `theta` must outlive it; its weights are shared, not copied. `actor`: of the run, whose loss's clip,
  // aggregation, plans and optimizer are taken over.
  SparseStudent(Model& theta, const SparseTrainingSettings& settings, const ActorSettings& actor,
                const SparsePolicy& policy, int64_t total_steps, uint64_t seed);

  Model& model() { return *model_; }                     // theta with phi: what generates
  const ActorSettings& actor() const { return actor_; }  // of phi's step
  void use_costs(const PassCosts* costs) { gradient_->use_costs(costs); }

  // Phi's step. dense_log_probs_R: theta's before its own step, one a trained token of the rows, in
  // make_batch's order. Metrics sparse/* (docs/formats.md).
  MetricValues train(const std::vector<const Trajectory*>& rows, const at::Tensor& dense_log_probs_R,
                     const std::string& strategy);

  // copies: in tensors of its own, so that phi may be trained on while it is written.
  SparseStudentSnapshot snapshot(bool copies) const;
  // Goes on from what a snapshot saved, bit for bit.
  void load(const std::filesystem::path& directory);

 private:
  const ActorSettings actor_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<GradientStep> gradient_;
  std::unique_ptr<Optimizer> optimizer_;
};

// How far the policy that drew the samples (mu, the engine's) and the dense one are apart:
// `sparse/acceptance`, the mean of min(1, pi_dense / mu) over the sampled tokens, which is the sum over the
// vocabulary of the smaller of the two probabilities without bias, its 5th percentile over the rows, and the
// same by the token's place in its response (0 to 255, 1,023, 4,095, and beyond).
MetricValues acceptance_metrics(const std::vector<const Trajectory*>& rows, const TrainBatch& batch,
                                const at::Tensor& dense_log_probs_R);

// Below this mean the samples are those of another policy than the one that is trained.
inline constexpr double kLeastAcceptance = 0.86;

}  // namespace bough
