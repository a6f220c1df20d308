// The system oracle (engine.md 4): every plan on random trees against the flat batch (each sequence alone).
#include "train/executor.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <array>
#include <iostream>

#include "base/error.h"
#include "models/lora.h"
#include "train/optimizer.h"
#include "train/reference_comparison.h"

namespace bough {
namespace {

// One seed in `every_large` has a tree of up to 2,000 tokens, one in `every_medium` a tree of up to 500. All
// other trees have up to 100.
void expect_every_plan_exact(int64_t begin, int64_t end, int64_t every_large, int64_t every_medium,
                             ModelConfig (*config_of)(uint64_t seed) = random_config) {
  const auto loss = full_loss();
  for (int64_t seed = begin; seed < end; ++seed) {
    const int64_t max_tokens = seed % every_large == 0 ? 2000 : seed % every_medium == 0 ? 500 : 100;
    const auto r = random_batch(seed, max_tokens);
    auto model = random_model(config_of(seed), seed, at::kDouble);
    auto flat = FlatReference(*model).run(r->batch, *loss);
    std::mt19937_64 random(seed);
    const int64_t limits[] = {1 + static_cast<int64_t>(random() % 8),
                              1 + static_cast<int64_t>(random() % max_tokens), 4096};
    for (const char* strategy : kStrategies)
      for (const int64_t limit : limits) {
        if (limit < 4 && max_tokens > 500) continue;
        const Plan plan = with_random_keeps(make_plan(strategy, plan_request(r->batch, limit)), random());
        validate(plan, r->batch.sequences);
        // If nothing reads an output of a recomputed layer, only verification computes this output. So the
        // test runs with and without verification.
        expect_exact(*model, flat, *r, plan, *loss, str(strategy, " seed ", seed, " B ", limit),
                     /*least_run=*/0, /*verify_recompute=*/random() % 2 == 0);
        if (::testing::Test::HasFatalFailure()) return;
      }
  }
}

TEST(Executor, EveryPlanHasTheFlatBatchsGradients) {
  expect_every_plan_exact(0, 100, 50, 10);
}

TEST(Executor, EveryPlanOfAMixtureHasTheFlatBatchsGradients) {
  expect_every_plan_exact(0, 100, 150, 50, random_mixture_config);
}

TEST(SlowExecutor, EveryPlanHasTheFlatBatchsGradients) {
  if (!is_slow_suite()) GTEST_SKIP() << "in the slow suite";
  // A large tree takes as long as 60 small ones. The periods 211 and 23 are primes, so that large trees meet
  // every kind of model.
  expect_every_plan_exact(100, 3000, 211, 23);
  expect_every_plan_exact(100, 300, 150, 50, random_mixture_config);
}

// Calls test(batch, expect) for random batches and models. expect(plan, what, least_run) checks that the plan
// has the flat batch's gradients.
template <class Test>
void for_random_batches(int64_t num_seeds, int64_t max_tokens, Test&& test) {
  const auto loss = full_loss();
  for (int64_t seed = 0; seed < num_seeds; ++seed) {
    const auto r = random_batch(seed, max_tokens);
    auto model = random_model(seed, at::kDouble);
    auto flat = FlatReference(*model).run(r->batch, *loss);
    test(r->batch, [&](const Plan& plan, const std::string& what, int64_t least_run = 0) {
      expect_exact(*model, flat, *r, plan, *loss, str(what, " seed ", seed), least_run);
    });
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(Executor, EveryPackersTreesAreExact) {
  for_random_batches(12, 100, [](const TrainBatch& batch, auto&& expect) {
    for (const auto packer : packer_names()) {
      PlanRequest request = plan_request(batch, 1);
      for (const TokenSpan& sequence : request.sequences)  // no longer, to have several trees
        request.max_tokens_per_pass = std::max(request.max_tokens_per_pass, std::ssize(sequence));
      if (packer == "exact" && request.sequences.size() > 10) continue;  // only for small trees
      request.packer = packer;
      expect(make_plan("packed", request), str(packer));
    }
  });
}

TEST(Executor, EveryNumberOfMicroBatchesIsExact) {
  for_random_batches(12, 100, [](const TrainBatch& batch, auto&& expect) {
    for (const int64_t count : {1, 2, 5, 100})
      for (const char* allocation : {"dynamic", "fixed"}) {
        const MicroBatchSettings settings{.max_tokens_per_mb = 64, .n_mbs = count, .allocation = allocation};
        expect(make_plan("dense", plan_request(batch, settings, {}, nullptr)), str(allocation, " ", count));
      }
  });
}

TEST(Executor, AStackFitsEachTreeThatComesAfterAShallowerOne) {
  for_random_batches(8, 200, [](const TrainBatch& batch, auto&& expect) {
    // One tree per sequence, in chunks of 8 tokens, sorted by the depth of the prefix KV stack.
    const PlanRequest whole = plan_request(batch, 8);
    Plan plan = make_plan("path", part_of(whole, {}));
    for (int64_t i = 0; i < std::ssize(whole.sequences); ++i) {
      Plan one = make_plan("path", part_of(whole, std::span(&i, 1)));
      for (PlannedTree& planned : one.trees) {
        for (int64_t& sequence : planned.sequences) sequence = i;
        plan.trees.push_back(std::move(planned));
      }
    }
    std::ranges::stable_sort(plan.trees, {}, &PlannedTree::stack_capacity);
    expect(plan, "a tree for each sequence");
  });
}

TEST(Executor, RunsAttendedByThemselvesAreExact) {
  for_random_batches(12, 200, [](const TrainBatch& batch, auto&& expect) {
    for (const char* strategy : {"path", "blocks"})
      for (const int64_t least_run : {1, 5})
        expect(make_plan(strategy, plan_request(batch, 48)), str(strategy, " runs of ", least_run),
               least_run);
  });
}

// The graph of a recomputed layer is that of a layer whose activations are kept. The gradients are therefore
// equal to the bit, in every dtype, with and without adapters.
TEST(Executor, GradientsHaveTheSameBitsForEveryRecomputePolicy) {
  const auto loss = full_loss();
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16})
    for (int64_t seed = 0; seed < 16; ++seed) {
      auto r = random_batch(seed, 200);
      r->batch.fields = to_type(r->batch.fields, accumulator_type(type));
      auto model = random_model((seed % 4 < 2 ? random_config : random_mixture_config)(seed), seed, type);
      if (seed % 2 == 1) {
        add_adapter(*model, {.rank = 3}, seed);
        auto generator = at::detail::createCPUGenerator(seed);
        for (Parameter* parameter : model->trained_parameters())  // with B = 0, A would have no gradient
          parameter->value.normal_(0, 0.3, generator);
      }
      model->allocate_gradients();
      const auto gradients_with = [&](const Plan& plan) {
        model->zero_gradients();
        Executor(*model, {.head_chunk_rows = 7}).execute(plan, r->batch, *loss);
        std::vector<at::Tensor> gradients;
        for (Parameter* parameter : model->trained_parameters())
          gradients.push_back(parameter->main_grad.clone());
        return gradients;
      };
      for (const char* strategy : kStrategies) {
        Plan plan = make_plan(strategy, plan_request(r->batch, 24));
        for (auto& planned : plan.trees)
          for (auto& block : planned.blocks) block.keep = RecomputePolicy::kActivations;
        const std::vector<at::Tensor> kept = gradients_with(plan),
                                      some_kept = gradients_with(with_random_keeps(plan, seed));
        for (size_t i = 0; i < kept.size(); ++i)
          ASSERT_TRUE(some_kept[i].equal(kept[i])) << type << " " << strategy << " seed " << seed << " " << i;
      }
    }
}

// Each pass copies host data to the device exactly once, whatever its recompute policy and its number of head
// chunks.
TEST(Executor, IndicesGoToTheDeviceOncePerPass) {
  const auto loss = full_loss();
  for (int64_t seed = 0; seed < 12; ++seed) {
    const auto r = random_batch(seed, 200);
    auto model = random_model(seed, at::kDouble);
    for (const char* strategy : kStrategies) {
      const Plan plan = with_random_keeps(make_plan(strategy, plan_request(r->batch, 24)), seed);
      int64_t num_passes = 0;
      for (const auto& planned : plan.trees)
        for (const auto& step : planned.steps) num_passes += planned.blocks[step.block].needed;
      model->allocate_gradients();
      Executor executor(*model, {.head_chunk_rows = 3});
      EXPECT_EQ(executor.execute(plan, r->batch, *loss).num_uploads, num_passes) << strategy << seed;
    }
  }
}

TEST(Executor, OneTokenAPassIsExact) {
  const auto loss = full_loss();
  const auto r = random_batch(4, 120);
  auto model = random_model(4, at::kDouble);
  auto flat = FlatReference(*model).run(r->batch, *loss);
  for (const char* strategy : kStrategies)
    expect_exact(*model, flat, *r, make_plan(strategy, plan_request(r->batch, 1)), *loss, strategy);
}

TEST(Executor, NestedPrefixesAreExact) {
  std::vector<int32_t> longest(1100);
  for (size_t i = 0; i < longest.size(); ++i) longest[i] = static_cast<int32_t>(i * 7 % kVocab);
  RandomBatch r;
  for (size_t n = 1; n <= longest.size(); ++n) {
    std::vector<uint8_t> mask(n, 0);
    mask.back() = 1;
    r.trajectories.push_back(trajectory_of({longest.begin(), longest.begin() + n}, std::move(mask)));
  }
  r.batch = make_batch(r.trajectories, {}, at::kDouble);
  r.batch.fields.advantages_R = at::ones({r.batch.num_rows()}, at::kDouble);
  r.batch.fields.weights_R = at::full({r.batch.num_rows()}, 1.0 / 1099, at::kDouble);
  LossSettings settings;
  settings.loss = "pg";
  const auto loss = make_loss(settings);
  auto model = random_model(1, at::kDouble);
  const auto plan = make_plan("path", plan_request(r.batch, 100));
  EXPECT_EQ(plan.trees[0].tree->num_tokens(), 1100);
  // The loss of one sequence that trains each of its tokens equals the sum of the losses of all prefixes,
  // each of which trains its last token only.
  RandomBatch whole;
  whole.trajectories = {trajectory_of(longest, std::vector<uint8_t>(longest.size(), 1))};
  whole.batch = make_batch(whole.trajectories, {}, at::kDouble);
  whole.batch.fields = r.batch.fields;
  whole.batch.fields.sequences_R = at::zeros({1099}, at::kLong);
  auto flat = FlatReference(*model).run(whole.batch, *loss);
  expect_exact(*model, flat, r, plan, *loss, "nested");
}

TEST(Executor, ForwardOnlyGivesTheSameValues) {
  const auto loss = full_loss();
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto r = random_batch(seed, 200);
    auto model = random_model(seed, at::kDouble);
    const auto flat = FlatReference(*model).run(r->batch, *loss);
    if (r->batch.num_rows() == 0) continue;
    for (const char* strategy : kStrategies) {
      const auto values =
          Executor(*model).execute_forward(make_plan(strategy, plan_request(r->batch, 16)), r->batch);
      EXPECT_LE((values.log_probs_R - flat.log_probs_R).abs().max().item<double>(), 1e-10);
      EXPECT_LE((values.entropies_R - flat.entropies_R).abs().max().item<double>(), 1e-10);
    }
  }
}

// A loss with coupling scope `sequence` or `batch`: the sum over sequences of (sum of log-probabilities)^2.
class SquaredSequenceLoss : public Loss {
 public:
  explicit SquaredSequenceLoss(CouplingScope coupling) : coupling_(coupling) {}
  CouplingScope coupling() const override { return coupling_; }
  bool needs_advantages() const override { return false; }
  bool needs_behaviour() const override { return false; }
  bool needs_proximal() const override { return false; }
  bool needs_reference() const override { return false; }
  bool needs_entropy() const override { return false; }
  LossOutput operator()(const LossRows& rows) const override {
    if (rows.log_probs_R.numel() == 0) return {rows.log_probs_R.sum(), {}};
    const auto sums = at::zeros({rows.sequences_R.max().item<int64_t>() + 1}, rows.log_probs_R.options())
                          .index_add(0, rows.sequences_R, rows.log_probs_R);
    return {sums.square().sum(), {}};
  }

 private:
  const CouplingScope coupling_;
};

TEST(Executor, LossesThatCoupleTokensAreExact) {
  for (const CouplingScope coupling : {CouplingScope::kSequence, CouplingScope::kBatch}) {
    const SquaredSequenceLoss loss(coupling);
    for (uint64_t seed = 0; seed < 5; ++seed) {
      const auto r = random_batch(seed, 200);
      auto model = random_model(seed, at::kDouble);
      auto flat = FlatReference(*model).run(r->batch, loss);
      // Passes of 16 tokens, and passes that hold one or several whole sequences.
      for (const int64_t limit : {16, 4096})
        for (const char* strategy : kStrategies)
          expect_exact(*model, flat, *r, make_plan(strategy, plan_request(r->batch, limit)), loss,
                       str(strategy, " ", limit, " seed ", seed));
    }
  }
}

// A loss that couples a sequence (gspo) or the batch (clip_cov) needs a forward-only plan execution first,
// unless each sequence, or the batch, lies in one pass.
TEST(Executor, ExecutesAheadOnlyIfTheLossCouplesTokensOfSeveralPasses) {
  const auto r = random_batch(5, 200);
  auto model = random_model(5, at::kDouble);
  const auto executes_ahead = [&](const char* strategy, int64_t limit, const char* loss) {
    LossSettings settings;
    settings.loss = loss;
    return needs_values_first(make_plan(strategy, plan_request(r->batch, limit)), *make_loss(settings));
  };
  EXPECT_FALSE(executes_ahead("blocks", 16, "ppo"));
  EXPECT_TRUE(executes_ahead("blocks", 16, "gspo"));
  EXPECT_TRUE(executes_ahead("path", 16, "gspo"));
  EXPECT_FALSE(executes_ahead("dense", 64, "gspo"));
  EXPECT_TRUE(executes_ahead("dense", 64, "clip_cov")) << "it couples the batch";
  EXPECT_FALSE(executes_ahead("dense", 1 << 20, "clip_cov")) << "one pass";
  EXPECT_FALSE(executes_ahead("blocks", 1 << 20, "gspo"));
}

// Every loss with its default correction, and PPO with every other correction.
std::vector<LossSettings> every_loss() {
  std::vector<LossSettings> all;
  for (const std::string& name : loss_names()) {
    all.emplace_back();
    all.back().loss = name;
    all.back().clip_cov_lb = 0.1;
    all.back().clip_cov_ratio = all.back().kl_cov_ratio = 0.1;
    if (name == "pg") all.back().entropy_coef = 0.1;
  }
  for (const std::string& name : correction_names()) {
    all.emplace_back();
    all.back().correction = name;
    if (name != "cap" && name != "auto" && name != "none") all.back().correction_upper = 1.5;
    if (name == "obrs") all.back().loss = "gspo";
    if (name == "tis" || name == "masked_is") all.back().correction_level = "geometric";
  }
  all.emplace_back();
  all.back().rejection_sampling = {.level = "sequence", .upper = 1.05, .lower = 0.9};
  all.emplace_back();
  all.back().off_policy_mask_threshold = 0.5;
  all.back().m2_threshold = 0.1;
  for (const char* mode : {"k1", "k2", "k3", "topk"})
    for (const char* loss : {"ppo", "gspo"}) {
      all.emplace_back();
      all.back().loss = loss;
      all.back().teacher.path = "t";
      all.back().teacher.loss_mode = mode;
    }
  all.emplace_back();
  all.back().correction = "obrs";
  all.back().obrs_normalizer = "none";
  all.emplace_back();
  all.back().kl_loss_coef = 0.3;
  all.back().kl_loss_type = "unbiased";
  return all;
}

// On trees, every loss has the gradient that it has if each sequence is computed alone. This holds for losses
// that need a forward-only plan execution first, and for all others.
TEST(Executor, EveryLossAndCorrectionIsExact) {
  const std::vector<LossSettings> all = every_loss();
  for (uint64_t seed = 0; seed < 3; ++seed) {
    const auto r = random_batch(seed, 120);
    add_top_k_tokens(*r, seed);
    auto model = random_model(seed, at::kDouble);
    for (const LossSettings& settings : all) {
      const auto loss = make_loss(settings);
      auto flat = FlatReference(*model).run(r->batch, *loss);
      for (const auto& [strategy, limit] : {std::pair{"path", 16}, {"blocks", 16}, {"dense", 64}})
        expect_exact(
            *model, flat, *r, make_plan(strategy, plan_request(r->batch, limit)), *loss,
            str(settings.loss, " ", settings.correction, " ",
                settings.teacher.is_used() ? settings.teacher.loss_mode : "", " ", strategy, " seed ", seed));
    }
  }
}

// Batches as a run records them: the behavior log-probabilities are near those of the initial model.
std::vector<std::unique_ptr<RandomBatch>> recorded_batches(Model& model, int64_t count, bool with_top_k) {
  std::vector<std::unique_ptr<RandomBatch>> batches;
  for (uint64_t seed = 0; std::ssize(batches) < count; ++seed) {
    auto r = random_batch(seed, 40);
    if (r->batch.num_rows() == 0) continue;
    if (with_top_k) add_top_k_tokens(*r, seed);
    const at::Tensor now_R =
        Executor(model).execute_forward(make_plan("dense", plan_request(r->batch, 64)), r->batch).log_probs_R;
    auto generator = at::detail::createCPUGenerator(seed);
    LossRows& fields = r->batch.fields;
    for (at::Tensor* old_R : {&fields.behaviour_log_probs_R, &fields.proximal_log_probs_R})
      *old_R = (now_R + 0.1 * at::randn(now_R.sizes(), generator, now_R.options())).clamp_max(-1e-3);
    batches.push_back(std::move(r));
  }
  return batches;
}

// Differences between two trainings that start from the same weights, one with plans[0], one with plans[1].
struct Drift {
  double log_probs = 0, parameters = 0, moved = 0;
};
Drift train_both(const LossSettings& settings, const std::vector<std::unique_ptr<RandomBatch>>& batches,
                 at::ScalarType type, const std::array<const char*, 2>& plans) {
  const auto loss = make_loss(settings);
  std::unique_ptr<Model> models[2];
  std::vector<Optimizer> optimizers;
  optimizers.reserve(2);
  for (auto& model : models) {
    model = random_model(3, type);
    optimizers.emplace_back(*model, OptimizerSettings{.lr = 1e-3}, 50);
  }
  Drift drift;
  for (const auto& r : batches) {
    r->batch.fields = to_type(r->batch.fields, type);
    at::Tensor log_probs_R[2];
    for (size_t i = 0; i < 2; ++i) {
      log_probs_R[i] = Executor(*models[i])
                           .execute(make_plan(plans[i], plan_request(r->batch, 16)), r->batch, *loss)
                           .values.log_probs_R.to(at::kDouble);
      optimizers[i].step();
    }
    drift.log_probs = std::max(drift.log_probs, (log_probs_R[0] - log_probs_R[1]).abs().max().item<double>());
  }
  const auto start = random_model(3, type);
  for (size_t p = 0; p < start->parameters().size(); ++p) {
    const auto at_end = [&](Model& model) { return model.parameters()[p]->value.to(at::kDouble); };
    const auto difference = [&](Model& a, Model& b) {
      return (at_end(a) - at_end(b)).abs().max().item<double>();
    };
    drift.parameters = std::max(drift.parameters, difference(*models[0], *models[1]));
    drift.moved = std::max(drift.moved, difference(*models[0], *start));
  }
  return drift;
}

// KL-Cov is left out. It has no clip, so its ratios grow without bound on batches that another policy
// sampled. Rounding errors grow with the ratios, so that a comparison after 50 batches says nothing.
// EveryLossAndCorrectionIsExact covers one optimizer step of KL-Cov.
TEST(SlowExecutor, AfterFiftyBatchesTreeAndDenseAreTheSameModel) {
  if (!is_slow_suite()) GTEST_SKIP() << "in the slow suite";
  const auto start = random_model(3, at::kDouble);
  const auto batches = recorded_batches(*start, 50, true);
  for (const LossSettings& settings : every_loss()) {
    if (settings.loss == "kl_cov") continue;
    const Drift drift = train_both(settings, batches, at::kDouble, {"dense", "blocks"});
    const std::string what = str(settings.loss, " ", settings.correction, " ",
                                 settings.teacher.is_used() ? settings.teacher.loss_mode : "");
    EXPECT_LE(drift.log_probs, 1e-8) << what;
    EXPECT_LE(drift.parameters, 1e-8) << what;
    EXPECT_GT(drift.moved, 1e-3) << what << " trained nothing";
  }
}

// In fp32, AdamW turns rounding errors of gradients near 0 into updates of full size. The test reports the
// difference and bounds it only loosely.
TEST(SlowExecutor, AfterFiftyBatchesInFp32TheDifferenceIsSaid) {
  if (!is_slow_suite()) GTEST_SKIP() << "in the slow suite";
  const auto start = random_model(3, at::kDouble);
  for (const char* loss : {"ppo", "gspo"}) {
    LossSettings settings;
    settings.loss = loss;
    const Drift drift =
        train_both(settings, recorded_batches(*start, 50, false), at::kFloat, {"dense", "blocks"});
    RecordProperty(str(loss, "_log_probs"), str(drift.log_probs));
    RecordProperty(str(loss, "_parameters"), str(drift.parameters));
    std::cout << loss << " in fp32: log-probabilities " << drift.log_probs << ", parameters "
              << drift.parameters << "\n";
    EXPECT_LE(drift.parameters, 50 * 1e-3) << "more than whole steps";
  }
}

// The most likely tokens of each loss row and the log-probabilities of the batch's top-k tokens agree with
// the flat batch in every plan.
TEST(Executor, TopKLogProbabilitiesAreTheFlatBatchs) {
  int64_t checked = 0;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const auto r = random_batch(seed, 150);
    if (r->batch.num_rows() == 0) continue;
    add_top_k_tokens(*r, seed);
    auto model = random_model(seed, at::kDouble);
    const FlatReference flat(*model);
    for (const char* strategy : kStrategies) {
      const auto values =
          Executor(*model, {.head_chunk_rows = 7})
              .execute_forward(make_plan(strategy, plan_request(r->batch, 16)), r->batch, {.top_k = 4});
      for (size_t s = 0; s < r->batch.sequences.size(); ++s) {
        const auto& positions = r->batch.trained_positions[s];
        if (positions.empty()) continue;
        const auto& tokens = r->batch.sequences[s];
        const auto all = flat.sequence({tokens.begin(), tokens.end()}, r->batch.temperature).all_log_probs;
        for (size_t i = 0; i < positions.size(); ++i) {
          const int64_t row = r->batch.row_offset[s] + static_cast<int64_t>(i);
          const auto log_p = all[positions[i] - 1];
          const auto [top, ids] = log_p.topk(4);
          EXPECT_TRUE(at::equal(values.top_ids_RK[row], ids)) << strategy << " seed " << seed;
          EXPECT_LE((values.top_log_probs_RK[row] - top).abs().max().item<double>(), 1e-10);
          const auto given = log_p.index_select(0, r->batch.top_k_ids_RK[row]);
          EXPECT_LE((values.top_k_log_probs_RK[row] - given).abs().max().item<double>(), 1e-10);
          ++checked;
        }
      }
    }
  }
  EXPECT_GT(checked, 100);
}

TEST(Executor, NoTrainedTokenMeansNoLossAndNoGradient) {
  RandomBatch r;
  r.trajectories = {trajectory_of({1, 2, 3}, {0, 0, 0}), trajectory_of({1, 2, 4}, {1, 0, 0}),
                    trajectory_of({}, {})};
  r.batch = make_batch(r.trajectories, {}, at::kDouble);
  ASSERT_EQ(r.batch.num_rows(), 0);
  r.batch.fields.advantages_R = r.batch.fields.weights_R = at::zeros({0}, at::kDouble);
  LossSettings settings;
  settings.loss = "pg";
  auto model = random_model(1, at::kDouble);
  const auto result =
      Executor(*model).execute(make_plan("path", plan_request(r.batch, 8)), r.batch, *make_loss(settings));
  EXPECT_EQ(result.loss, 0);
  for (Parameter* parameter : model->parameters())
    EXPECT_EQ(parameter->main_grad.abs().max().item<double>(), 0);
}

}  // namespace
}  // namespace bough
