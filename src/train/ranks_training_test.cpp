// Trains a critic and a sparse policy in addition to the policy, on several ranks, and compares with one
// process. After an optimizer's first step, the first moment is the gradient times a constant, so the tests
// compare moments in place of gradients.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "models/lora.h"
#include "train/critic.h"
#include "train/ranks_test_util.h"
#include "train/sparse_policy_trainer.h"

namespace bough {
namespace {

std::map<std::string, at::Tensor> moments_of(const OptimizerSnapshot& snapshot) {
  std::map<std::string, at::Tensor> moments;
  for (const auto& [name, tensor] : snapshot.tensors)
    if (name.ends_with(".exp_avg")) moments[name] = tensor.clone();
  return moments;
}

// The largest relative error of the tensors in `own`: ||error|| / max(||expected||, 1e-5 of the largest
// norm), as in gradient_error().
double error_of(const std::map<std::string, at::Tensor>& own,
                const std::map<std::string, at::Tensor>& expected) {
  double largest = 0, worst = own.size() == expected.size() ? 0 : 1;
  for (const auto& [name, tensor] : expected) largest = std::max(largest, tensor.norm().item<double>());
  for (const auto& [name, tensor] : expected) {
    if (!own.contains(name)) return 1;
    const double error = (own.at(name) - tensor).norm().item<double>();
    if (error > 0) worst = std::max(worst, error / std::max(tensor.norm().item<double>(), 1e-5 * largest));
  }
  return worst;
}

at::Tensor noise(int64_t count, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn({count}, generator, at::TensorOptions().dtype(at::kDouble));
}

ActorSettings settings_of(uint64_t seed) {
  ActorSettings settings;
  settings.tree.tree_training_mode = seed % 2 == 0 ? "blocks" : "path";
  settings.mb_spec.max_tokens_per_mb = seed % 3 == 0 ? 6 : 30;
  settings.optimizer.gradient_clipping = seed % 2 == 0 ? 0.01 : 0;  // copied elements must count once
  settings.optimizer.warmup_steps_proportion = 0;
  return settings;
}

// ---- Critic.

const std::vector<ParallelSizes> kKinds = [] {
  std::vector<ParallelSizes> kinds = kSharedPasses;
  kinds.insert(kinds.begin(), {{.data = 2}, {.data = 3}});
  kinds.insert(kinds.end(), kPipelines.begin(), kPipelines.end());
  return kinds;
}();

// The results of one optimizer step of a critic.
struct CriticStep {
  at::Tensor values_R;
  ValueExecution execution;
  std::map<std::string, at::Tensor> moments;             // of the parameters that its optimizer updates
  std::map<std::string, at::Tensor> backbone_gradients;  // if it shares the actor's
  std::map<std::string, at::Tensor> head, backbone;      // as saved after the step
};

CriticStep step_of_critic(Model& model, bool shares_backbone, uint64_t seed, RandomBatch& r,
                          const TrainingRanks* groups) {
  CriticSettings settings;
  settings.share_backbone = shares_backbone;
  settings.loss_coef = 0.4;
  settings.optimizer = settings_of(seed).optimizer;
  Critic critic(model, settings, settings_of(seed), 10, groups);
  critic.head().weight.value.copy_(noise(critic.head().weight.value.numel(), 3).unsqueeze(0) * 0.5);
  critic.head().bias.value.copy_(noise(1, 4));
  TrainBatch batch = r.batch;
  CriticStep step;
  step.values_R = critic.values(batch);
  batch.old_values_R = step.values_R + noise(batch.num_rows(), seed);
  batch.returns_R = step.values_R + 2 * noise(batch.num_rows(), seed + 1);
  model.allocate_gradients();
  if (shares_backbone) {
    const auto loss = full_loss();
    ValueBlockHead beside = critic.beside_policy(batch);
    Executor(model, {.ranks = groups ? groups->loss_group() : nullptr,
                     .context_ranks = groups ? groups->context() : nullptr})
        .execute(critic.plan(batch), batch, *loss, &beside);
    step.execution = critic.result_of(beside);
    sum_gradients(model, groups ? groups->data_parallel_group() : nullptr);
    for (const auto& [name, gradient] : named_gradients(model))
      step.backbone_gradients[name] = gradient.clone();
  } else {
    step.execution = critic.add_gradient(critic.plan(batch), batch);
  }
  critic.optimizer().step();
  critic.optimizer().check_integrity();
  const CriticSnapshot snapshot = critic.snapshot(/*copies=*/true);
  const bool is_unsharded_here =
      !groups || (groups->shares_with_leader() && (groups->has_unsharded_model() || groups->is_rank_zero()));
  EXPECT_EQ(snapshot.backbone != nullptr, !shares_backbone && is_unsharded_here);
  if (!groups || groups->is_rank_zero()) {
    EXPECT_EQ(snapshot.head.size(), 2);
    for (const auto& [name, tensor] : snapshot.head) step.head[name] = tensor;
    if (snapshot.backbone)
      for (const auto& [name, tensor] : named_weights(*snapshot.backbone)) step.backbone[name] = tensor;
  }
  step.moments = moments_of(snapshot.optimizer);
  return step;
}

TEST(RanksTraining, ACriticsValuesAndGradientsAreOneProcesss) {
  for (uint64_t seed = 0; seed < 160; ++seed) {
    const ParallelSizes& sizes = kKinds[seed % std::size(kKinds)];
    const bool shares_backbone = seed / std::size(kKinds) % 2 == 0;
    const auto r = random_batch(seed, 80);
    if (r->batch.num_rows() == 0) continue;
    ModelConfig config = staged_config(seed, sizes.pipeline);
    config.computes_logits = shares_backbone;
    const auto whole = random_model(config, seed, at::kDouble);
    const auto alone = random_model(config, seed, at::kDouble);
    const CriticStep expected = step_of_critic(*alone, shares_backbone, seed, *r, nullptr);
    on_rank_groups(sizes, *whole, [&](TrainingRanks& groups, Model& model) {
      const CriticStep own = step_of_critic(model, shares_backbone, seed, *r, &groups);
      const std::string what = str("seed ", seed, ": ", sizes.data, " x ", sizes.context, " x ", sizes.tensor,
                                   " x ", sizes.pipeline, " rank ", groups.all()->rank());
      EXPECT_LE((own.values_R - expected.values_R).abs().max().item<double>(), 1e-10) << what;
      EXPECT_LE((own.execution.values_R - expected.execution.values_R).abs().max().item<double>(), 1e-10)
          << what;
      EXPECT_NEAR(own.execution.loss, expected.execution.loss, 1e-10 * std::max(1.0, expected.execution.loss))
          << what;
      EXPECT_EQ(own.execution.metrics.at("critic/clip_fraction").value(),
                expected.execution.metrics.at("critic/clip_fraction").value())
          << what;
      // In a pipeline, the first stage collects the gradients of all layers, so only it compares.
      if (model.stage().is_first()) {
        EXPECT_LE(error_of(own.backbone_gradients, expected.backbone_gradients), 1e-10) << what;
      }
      EXPECT_EQ(own.moments.empty(), !groups.is_rank_zero());
      if (!groups.is_rank_zero()) return;
      EXPECT_LE(error_of(own.moments, expected.moments), 1e-10) << what;
      EXPECT_LE(error_of(own.head, expected.head), 1e-7) << what;
      EXPECT_LE(error_of(own.backbone, expected.backbone), 1e-7) << what;
    });
    ASSERT_FALSE(HasFailure()) << seed;
  }
}

// ---- Sparse policy.

// Trajectories with contexts beyond the budget of keys. Their advantages and behavior log-probabilities are
// random.
std::vector<Trajectory> long_rows(uint64_t seed) {
  std::vector<Trajectory> rows = random_batch(seed, 400)->trajectories;
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].logprobs.assign(rows[i].input_ids.size(), -4.0f);
    rows[i].advantage = {static_cast<float>(i % 3) - 0.9f};
  }
  return rows;
}

struct SparsePolicyStep {
  MetricValues metrics;
  std::map<std::string, at::Tensor> moments;
};

SparsePolicyStep step_of_sparse_policy(bool is_draft, Model& trained_model, uint64_t seed,
                                       const std::vector<Trajectory>& rows, const TrainingRanks* groups) {
  SparseTrainingSettings settings{
      .mode = is_draft ? "draft" : "distill", .kl_loss_coef = 0.2, .lora = {.rank = 3}};
  const SparsePolicy policy =
      is_draft ? SparsePolicy() : SparsePolicy{.budget_blocks = 4, .summary = BlockSummary::kMean};
  const ActorSettings actor = settings_of(seed);
  const SparsePolicyOptions options{
      .settings = settings, .actor = actor, .policy = policy, .total_steps = 10, .ranks = groups};
  std::unique_ptr<SparsePolicyTrainer> sparse_trainer;
  if (is_draft) {
    sparse_trainer = std::make_unique<SparsePolicyTrainer>(random_model(seed + 1, at::kDouble), options);
  } else {
    sparse_trainer = std::make_unique<SparsePolicyTrainer>(trained_model, seed, options);
    for (Parameter* parameter :
         sparse_trainer->model().trained_parameters())  // with B = 0, A has no gradient
      parameter->value.copy_(noise(parameter->value.numel(), seed).view(parameter->value.sizes()) * 0.1);
  }
  std::vector<const Trajectory*> pointers;
  for (const Trajectory& row : rows) pointers.push_back(&row);
  const int64_t num_rows = make_batch(rows, {}, at::kDouble).num_rows();
  SparsePolicyStep step;
  step.metrics = sparse_trainer->update_weights(pointers, {.log_probs_R = -4 + 0.3 * noise(num_rows, seed)},
                                                actor.tree.strategy());
  step.moments = moments_of(sparse_trainer->snapshot(/*copies=*/true).optimizer);
  return step;
}

TEST(RanksTraining, TheGeneratingPolicysStepIsOneProcesss) {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    const bool is_draft = seed % 3 == 2;
    const std::vector<Trajectory> rows = long_rows(seed);
    if (make_batch(rows, {}, at::kDouble).num_rows() == 0) continue;
    const auto trained_model = random_model(seed, at::kDouble);
    const SparsePolicyStep expected = step_of_sparse_policy(is_draft, *trained_model, seed, rows, nullptr);
    ASSERT_GT(expected.metrics.at("sparse/grad_norm"), 1e-6) << seed;
    on_rank_groups({.data = 2 + static_cast<int64_t>(seed % 2)}, *trained_model,
                   [&](TrainingRanks& groups, Model& model) {
                     const SparsePolicyStep own = step_of_sparse_policy(is_draft, model, seed, rows, &groups);
                     for (const auto& [name, value] : expected.metrics)
                       EXPECT_NEAR(own.metrics.at(name), value, 1e-10 * std::max(1.0, std::abs(value)))
                           << name << " seed " << seed;
                     EXPECT_LE(groups.is_rank_zero() ? error_of(own.moments, expected.moments) : 0, 1e-10)
                         << seed;
                   });
  }
}

}  // namespace
}  // namespace bough
