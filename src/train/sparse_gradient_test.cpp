// Gradients under block selection on trees: of the policy (mode sparse_to_sparse) and of the sparse policy's
// adapters (phi, mode distill). The reference is the flat batch with an explicit attention mask. The mask is
// computed here, query by query with tensor ops, from the definition in kernels/page_choice/page_choice.h.
#include <gtest/gtest.h>

#include <ATen/Parallel.h>

#include <algorithm>
#include <numeric>

#include "models/lora.h"
#include "train/reference_comparison.h"
#include "train/sparse_policy_trainer.h"

namespace bough {
namespace {

// The keys that the queries of a layer do not attend to. Counts the (query, head) pairs with such keys.
class MaskOfBlocks {
 public:
  explicit MaskOfBlocks(const SparsePolicy& policy) : policy_(policy) {}

  at::Tensor operator()(int64_t layer, const at::Tensor& q_NTH, const at::Tensor& k_GTH,
                        const std::vector<uint8_t>& is_sampled) {
    if (layer < policy_.dense_layers) return {};
    const int64_t N = q_NTH.size(0), T = q_NTH.size(1), G = k_GTH.size(0), H = k_GTH.size(2), heads = N / G;
    const int64_t tokens = policy_.block_tokens, complete = T / tokens, first = policy_.first_blocks;
    at::Tensor hidden_NTT = at::zeros({N, T, T}, at::kBool);
    if (policy_.summary == BlockSummary::kExact) {
      const at::Tensor scores_NTT = at::matmul(q_NTH, k_GTH.repeat_interleave(heads, 0).transpose(1, 2));
      for (int64_t n = 0; n < N; ++n)
        for (int64_t t = policy_.budget_blocks * tokens; t < T; ++t)
          if (is_sampled[static_cast<size_t>(t)] != 0)
            hide_lowest(scores_NTT[n][t].narrow(0, 0, t + 1), hidden_NTT[n][t]);
      return hidden_NTT;
    }
    if (complete == 0) return hidden_NTT;
    for (int64_t g = 0; g < G; ++g) {
      const at::Tensor blocks_BPH = k_GTH[g].narrow(0, 0, complete * tokens).view({complete, tokens, H});
      const at::Tensor q_T1H = q_NTH.narrow(0, g * heads, heads).mean(0).unsqueeze(1);
      const at::Tensor scores_TB =
          policy_.summary == BlockSummary::kMean
              ? (q_T1H * blocks_BPH.mean(1).unsqueeze(0)).sum(-1)
              : at::maximum(q_T1H * blocks_BPH.amin(1).unsqueeze(0), q_T1H * blocks_BPH.amax(1).unsqueeze(0))
                    .sum(-1);
      for (int64_t t = 0; t < T; ++t) {
        const int64_t blocks = t / tokens + 1;
        int64_t budget = policy_.budget_blocks;
        for (const auto& [from, larger] : policy_.larger_budgets)
          if (t + 1 >= from) budget = larger;
        if (is_sampled[static_cast<size_t>(t)] == 0 || blocks <= budget) continue;
        ++num_choices_;
        const double* scores = scores_TB.const_data_ptr<double>() + t * complete;
        std::vector<int64_t> ranked(static_cast<size_t>(blocks - first - policy_.last_blocks));
        std::iota(ranked.begin(), ranked.end(), first);
        std::stable_sort(ranked.begin(), ranked.end(),
                         [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
        for (auto i = static_cast<size_t>(budget - first - policy_.last_blocks); i < ranked.size(); ++i)
          hidden_NTT.narrow(0, g * heads, heads)
              .select(1, t)
              .narrow(1, ranked[i] * tokens, tokens)
              .fill_(true);
      }
    }
    return hidden_NTT;
  }
  int64_t num_choices() const { return num_choices_; }

 private:
  // Hides all keys except the highest-scored ones of the budget.
  void hide_lowest(const at::Tensor& scores_K, const at::Tensor& hidden_T) {
    ++num_choices_;
    const at::Tensor order_K = scores_K.argsort(/*stable=*/true, /*dim=*/0, /*descending=*/true);
    const int64_t kept = policy_.budget_blocks * policy_.block_tokens;
    hidden_T.index_fill_(0, order_K.narrow(0, kept, order_K.size(0) - kept), true);
  }

  SparsePolicy policy_;
  int64_t num_choices_ = 0;
};

// Blocks of all sizes.
SparsePolicy policy_of(uint64_t seed) {
  const int64_t sizes[] = {4, 8, 16, 32, 64}, tokens = sizes[seed % 5];
  const int64_t first = static_cast<int64_t>(seed % 3), last = tokens < 16 ? 16 / tokens : 1;
  const int64_t budget = first + last + std::max<int64_t>(1, 32 / tokens);
  std::map<int64_t, int64_t> larger;
  if (seed % 4 == 3) larger = {{150, budget + 2}};
  return {.budget_blocks = budget,
          .summary = seed % 2 == 0 ? BlockSummary::kMean : BlockSummary::kMinMax,
          .dense_layers = static_cast<int64_t>(seed % 5 == 1),
          .larger_budgets = std::move(larger),
          .block_tokens = tokens,
          .first_blocks = first,
          .last_blocks = last};
}

std::vector<const Trajectory*> pointers(const RandomBatch& r) {
  std::vector<const Trajectory*> rows;
  for (const Trajectory& trajectory : r.trajectories) rows.push_back(&trajectory);
  return rows;
}

// A tree with contexts far beyond the budget of keys. Sampled and other tokens alternate: prompts, turns,
// tool outputs.
std::unique_ptr<RandomBatch> long_batch(uint64_t seed) {
  auto r = random_batch(seed, 600);
  mark_tokens(r->batch, pointers(*r), {.sampled = true});
  return r;
}

void expect_gradient_of_masked(Model& model, const SparsePolicy& policy, const RandomBatch& r,
                               const std::string& what, int64_t& num_choices) {
  const auto loss = full_loss();
  MaskOfBlocks mask(policy);
  FlatResult flat = FlatReference(model, std::ref(mask)).run(r.batch, *loss);
  num_choices += mask.num_choices();
  for (const std::string strategy : {"path", "blocks", "packed"}) {
    model.allocate_gradients();
    model.zero_gradients();
    Executor executor(model, {.head_chunk_rows = 7, .verify_recompute = true, .sparse = policy});
    const auto plan = with_random_keeps(
        make_plan(strategy, plan_request(r.batch, strategy == "packed" ? 1024 : 90)), r.batch.num_rows());
    const ExecutionResult result = executor.execute(plan, r.batch, *loss);
    ASSERT_NEAR(result.loss, flat.loss, 1e-10 * std::max(1.0, std::abs(flat.loss))) << what;
    ASSERT_LE((result.values.log_probs_R - flat.log_probs_R).abs().max().item<double>(), 1e-10)
        << what << " " << strategy;
    ASSERT_LE(gradient_error(model, flat), 1e-10) << what << " " << strategy;
  }
}

constexpr uint64_t kSeeds[] = {3, 5, 7, 10, 16, 19};

TEST(SparseGradient, SparsePolicyEqualsMaskedSequences) {
  int64_t num_choices = 0;
  for (const uint64_t seed : kSeeds) {
    const auto r = long_batch(seed);
    if (r->batch.num_rows() == 0) continue;
    const auto model = random_model(seed, at::kDouble);
    expect_gradient_of_masked(*model, policy_of(seed), *r, str("seed ", seed), num_choices);
  }
  EXPECT_GT(num_choices, 2000) << "few queries left anything out";
}

TEST(SparseGradient, ExactTopKeysEqualMaskedSequences) {
  int64_t num_choices = 0;
  for (const uint64_t seed : {3, 10}) {
    const auto r = long_batch(seed);
    const auto model = random_model(seed, at::kDouble);
    SparsePolicy policy = policy_of(seed);
    policy.summary = BlockSummary::kExact;
    policy.larger_budgets.clear();
    expect_gradient_of_masked(*model, policy, *r, str("seed ", seed), num_choices);
  }
  EXPECT_GT(num_choices, 500);
}

// If all keys are 0, every block has the same score, while the attention values of the blocks differ.
TEST(SparseGradient, WithEqualScoresTheLowerBlocksAreSeen) {
  int64_t num_choices = 0;
  for (const uint64_t seed : {5, 17}) {  // models without biases and norms of keys
    const auto r = long_batch(seed == 5 ? 5 : 16);
    const auto model = random_model(seed, at::kDouble);
    for (Parameter* parameter : model->parameters())
      for (const auto& part : parameter->parts)
        if (part.name.ends_with("k_proj.weight")) parameter->part_value(part).zero_();
    expect_gradient_of_masked(*model, policy_of(seed), *r, str("seed ", seed), num_choices);
  }
  EXPECT_GT(num_choices, 500);
}

TEST(SparseGradient, AdaptersEqualMaskedSequencesAndThePolicyHasNoGradient) {
  int64_t num_choices = 0;
  for (const uint64_t seed : kSeeds) {
    const auto r = long_batch(seed);
    if (r->batch.num_rows() == 0) continue;
    const auto trained_model = random_model(seed, at::kDouble);
    const SparsePolicy policy = policy_of(seed);
    SparseTrainingSettings settings{
        .mode = "distill", .kl_loss_coef = 0.2, .kl_loss_type = seed % 2 == 0 ? "k2" : "k3"};
    settings.lora.rank = 3;
    SparsePolicyTrainer sparse_trainer(
        *trained_model, seed,
        {.settings = settings, .actor = ActorSettings(), .policy = policy, .total_steps = 10});
    Model& sparse_model = sparse_trainer.model();
    auto generator = at::detail::createCPUGenerator(seed);
    for (Parameter* parameter : sparse_model.trained_parameters())  // with B = 0, A would have no gradient
      parameter->value.copy_(0.1 *
                             at::randn(parameter->value.sizes(), generator, parameter->value.options()));

    GradientStep step(sparse_model, FrozenModels(&sparse_model), sparse_trainer.actor(), nullptr, nullptr,
                      policy);
    TrainBatch batch = step.rows_of(pointers(*r));
    batch.fields.advantages_R = r->batch.fields.advantages_R;
    batch.fields.proximal_is_current = true;
    const auto loss = make_loss(sparse_trainer.actor().loss);
    MaskOfBlocks mask(policy);
    FlatReference reference(sparse_model, std::ref(mask));
    // The dense log-probabilities are near the sparse ones, as in a run, because k3 grows exponentially with
    // their difference.
    batch.fields.reference_log_probs_R = at::zeros({batch.num_rows()}, at::kDouble);
    batch.fields.reference_log_probs_R =
        reference.run(batch, *loss).log_probs_R + 0.3 * at::randn({batch.num_rows()}, generator, at::kDouble);
    FlatResult flat = reference.run(batch, *loss);
    num_choices += mask.num_choices();
    for (const std::string strategy : {"path", "blocks"}) {
      sparse_model.zero_gradients();
      const ExecutionResult result = step.add_gradient(make_plan(strategy, plan_request(batch, 90)), batch);
      ASSERT_NEAR(result.loss, flat.loss, 1e-10 * std::max(1.0, std::abs(flat.loss))) << "seed " << seed;
      ASSERT_LE(gradient_error(sparse_model.trained_parameters(), flat), 1e-10)
          << "seed " << seed << " " << strategy;
      for (Parameter* parameter : sparse_model.parameters()) ASSERT_FALSE(parameter->main_grad.defined());
    }
  }
  EXPECT_GT(num_choices, 2000);
}

// The policy term of ppo times the factor of the settings, and KL k2, from the equations. The ratio is 1.
class CorrectedLoss : public Loss {
 public:
  CorrectedLoss(double kl_loss_coef, double cap, bool masks)
      : kl_loss_coef_(kl_loss_coef), cap_(cap), masks_(masks) {}
  CouplingScope coupling() const override { return CouplingScope::kNothing; }
  bool needs_advantages() const override { return true; }
  bool needs_behaviour() const override { return true; }
  bool needs_proximal() const override { return false; }
  bool needs_reference() const override { return true; }
  bool needs_entropy() const override { return false; }
  LossOutput operator()(const LossRows& rows) const override {
    const at::Tensor w_R = (rows.log_probs_R.detach() - rows.behaviour_log_probs_R).exp();
    const at::Tensor factor_R = masks_ ? w_R * (w_R <= cap_) : w_R.clamp_max(cap_);
    num_cut_ += (w_R > cap_).sum().item<int64_t>();
    const at::Tensor policy_R =
        -factor_R * (rows.log_probs_R - rows.log_probs_R.detach()).exp() * rows.advantages_R;
    const at::Tensor kl_R = (rows.reference_log_probs_R - rows.log_probs_R).square() / 2;
    return {.loss = (rows.weights_R * (policy_R + kl_loss_coef_ * kl_R)).sum()};
  }
  int64_t num_cut() const { return num_cut_; }

 private:
  const double kl_loss_coef_, cap_;
  const bool masks_;  // cap: a weight above the cap becomes 0; otherwise tis
  mutable int64_t num_cut_ = 0;
};

// The gradient of phi's step, from the optimizer's first moments after one step without clipping.
NamedTensors gradient_of_step(SparsePolicyTrainer& trainer, const std::vector<const Trajectory*>& rows,
                              const at::Tensor& dense_R) {
  trainer.update_weights(rows, {.log_probs_R = dense_R}, "path");
  NamedTensors gradients;
  for (const auto& [name, tensor] : trainer.snapshot(/*copies=*/true).optimizer.tensors)
    if (name.ends_with(".exp_avg"))
      gradients.emplace_back(name.substr(0, name.size() - std::string_view(".exp_avg").size()),
                             tensor / (1 - trainer.actor().optimizer.beta1));
  return gradients;
}

// Samples of older weights: the recorded log-probabilities differ from those of the current sparse policy.
TEST(SparseGradient, AStepOnStaleSamplesHasTheRunsCorrection) {
  int64_t num_cut = 0;
  for (const uint64_t seed : {3, 5, 10, 19})
    for (const bool is_stale : {false, true}) {
      const auto r = long_batch(seed);
      const auto trained_model = random_model(seed, at::kDouble);
      const SparsePolicy policy = policy_of(seed);
      SparseTrainingSettings settings{.mode = "distill", .kl_loss_coef = 0.2};
      settings.lora.rank = 3;
      ActorSettings actor;
      actor.optimizer.gradient_clipping = 0;
      const bool masks = seed % 2 == 0;
      if (masks) actor.loss.behave_imp_weight_cap = 1.2;
      else actor.loss.correction = "tis", actor.loss.correction_upper = 1.2;
      SparsePolicyTrainer trainer(*trained_model, seed,
                                  {.settings = settings,
                                   .actor = actor,
                                   .policy = policy,
                                   .total_steps = 10,
                                   .has_stale_samples = is_stale});
      auto generator = at::detail::createCPUGenerator(seed);
      for (Parameter* parameter : trainer.model().trained_parameters())  // with B = 0, A has no gradient
        parameter->value.copy_(0.1 *
                               at::randn(parameter->value.sizes(), generator, parameter->value.options()));
      MaskOfBlocks mask(policy);
      FlatReference reference(trainer.model(), std::ref(mask));
      const at::Tensor log_probs_R = reference.run(r->batch, *full_loss()).log_probs_R;
      const auto noise = [&] { return 0.3 * at::randn(log_probs_R.sizes(), generator, at::kDouble); };
      const at::Tensor dense_R = log_probs_R + noise(), behaviour_R = log_probs_R + noise();
      for (size_t s = 0, row = 0; s < r->trajectories.size(); ++s) {
        Trajectory& sample = r->trajectories[s];
        sample.logprobs.resize(sample.input_ids.size());
        sample.advantage = {static_cast<float>(s % 3) - 1.1f};
        for (const int32_t position : r->batch.trained_positions[s])
          sample.logprobs[static_cast<size_t>(position)] =
              static_cast<float>(behaviour_R[static_cast<int64_t>(row++)].item<double>());
      }
      GradientStep step(trainer.model(), FrozenModels(&trainer.model()), trainer.actor(), nullptr, nullptr,
                        policy);
      const TrainBatch batch = step.prepare_batch(pointers(*r), true, "path", {.log_probs_R = dense_R});
      const CorrectedLoss loss(0.2, is_stale ? 1.2 : 1e30, masks);
      TrainBatch compared = batch;
      if (!is_stale) compared.fields.behaviour_log_probs_R = log_probs_R;  // factor 1
      FlatResult flat = reference.run(compared, loss);
      num_cut += loss.num_cut();
      ASSERT_LE(gradient_error(gradient_of_step(trainer, pointers(*r), dense_R), flat), 1e-10)
          << "seed " << seed << (is_stale ? " stale" : "");
    }
  EXPECT_GT(num_cut, 50);
}

}  // namespace
}  // namespace bough
