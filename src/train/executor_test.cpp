// The system oracle (engine.md 4): random trees through every plan against the flat batch.
#include "train/executor.h"

#include <gtest/gtest.h>

#include <ATen/Parallel.h>

#include "base/error.h"
#include "train/exactness.h"

namespace bough {
namespace {

constexpr const char* kStrategies[] = {"dense", "path", "blocks"};

// Models this small run faster on one thread.
const bool one_thread = (at::set_num_threads(1), true);

// One seed in `every_large` has a tree of up to 2,000 tokens, one in `every_medium` of up to 500, the others
// of up to 100.
void expect_every_plan_exact(int64_t begin, int64_t end, int64_t every_large, int64_t every_medium) {
  const auto loss = full_loss();
  for (int64_t seed = begin; seed < end; ++seed) {
    const int64_t max_tokens = seed % every_large == 0 ? 2000 : seed % every_medium == 0 ? 500 : 100;
    const auto r = random_batch(seed, max_tokens);
    auto model = random_model(seed, at::kDouble);
    auto flat = FlatReference(*model).run(r->batch, *loss);
    std::mt19937_64 random(seed);
    const int64_t limits[] = {1 + static_cast<int64_t>(random() % 8),
                              1 + static_cast<int64_t>(random() % max_tokens), 4096};
    for (const char* strategy : kStrategies)
      for (const int64_t limit : limits) {
        if (limit < 4 && max_tokens > 500) continue;
        auto plan = make_plan(strategy, plan_request(r->batch, limit));
        validate(plan, r->batch.sequences);
        for (auto& planned : plan.trees)  // whatever is kept, gradients are the same
          for (auto& block : planned.blocks)
            if (block.interior) block.keep = static_cast<Keep>(random() % 3);
        expect_exact(*model, flat, *r, plan, *loss, str(strategy, " seed ", seed, " B ", limit));
        if (::testing::Test::HasFatalFailure()) return;
      }
  }
}

TEST(Executor, EveryPlanHasTheFlatBatchsGradients) {
  expect_every_plan_exact(0, 300, 50, 10);
}

TEST(SlowExecutor, EveryPlanHasTheFlatBatchsGradients) {
  if (!is_slow_suite()) GTEST_SKIP() << "in the slow suite";
  // A large tree takes as long as 60 small ones. Primes, so that they meet every kind of model.
  expect_every_plan_exact(300, 3000, 211, 23);
}

TEST(Executor, EveryPackersTreesAreExact) {
  const auto loss = full_loss();
  for (int64_t seed = 0; seed < 12; ++seed) {
    const auto r = random_batch(seed, 100);
    auto model = random_model(seed, at::kDouble);
    auto flat = FlatReference(*model).run(r->batch, *loss);
    for (const auto packer : packer_names()) {
      PlanRequest request = plan_request(r->batch, 1);
      for (const TokenSpan& sequence : request.sequences)  // no longer path, so that there are several trees
        request.max_tokens_per_pass = std::max(request.max_tokens_per_pass, std::ssize(sequence));
      if (packer == "exact" && request.sequences.size() > 10) continue;  // it is for small trees
      request.packer = packer;
      expect_exact(*model, flat, *r, make_plan("packed", request), *loss, str(packer, " seed ", seed));
    }
  }
}

TEST(Executor, EveryNumberOfMicroBatchesIsExact) {
  const auto loss = full_loss();
  for (int64_t seed = 0; seed < 12; ++seed) {
    const auto r = random_batch(seed, 100);
    auto model = random_model(seed, at::kDouble);
    auto flat = FlatReference(*model).run(r->batch, *loss);
    for (const int64_t count : {1, 2, 5, 100})
      for (const char* allocation : {"dynamic", "fixed"}) {
        const MicroBatchSettings settings{.max_tokens_per_mb = 64, .n_mbs = count, .allocation = allocation};
        const auto plan = make_plan("dense", plan_request(r->batch, settings, "auto", nullptr));
        expect_exact(*model, flat, *r, plan, *loss, str(allocation, " ", count, " seed ", seed));
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
  // One sequence that trains each of its tokens has the losses of the nested prefixes: each prefix trains its
  // last token only.
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
      const auto values = Executor(*model).forward(make_plan(strategy, plan_request(r->batch, 16)), r->batch);
      EXPECT_LE((values.log_probs_R - flat.log_probs_R).abs().max().item<double>(), 1e-10);
      EXPECT_LE((values.entropies_R - flat.entropies_R).abs().max().item<double>(), 1e-10);
    }
  }
}

// A loss that couples the tokens of a sequence: the square of its summed log-probabilities.
class SquaredSequenceLoss : public Loss {
 public:
  bool token_separable() const override { return false; }
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
};

TEST(Executor, LossesThatCoupleTokensAreExact) {
  const SquaredSequenceLoss loss;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto r = random_batch(seed, 200);
    auto model = random_model(seed, at::kDouble);
    auto flat = FlatReference(*model).run(r->batch, loss);
    for (const char* strategy : kStrategies)
      expect_exact(*model, flat, *r, make_plan(strategy, plan_request(r->batch, 16)), loss,
                   str(strategy, " seed ", seed));
  }
}

// Every loss with the correction it has by default, and PPO with every other one: through trees, at once or
// by values first, they have the gradient that they have sequence by sequence.
TEST(Executor, EveryLossAndCorrectionIsExact) {
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
  all.back().kl_loss_coef = 0.3;
  all.back().kl_loss_type = "unbiased";
  for (uint64_t seed = 0; seed < 3; ++seed) {
    const auto r = random_batch(seed, 120);
    add_given_tokens(*r, seed);
    auto model = random_model(seed, at::kDouble);
    for (const LossSettings& settings : all) {
      const auto loss = make_loss(settings);
      auto flat = FlatReference(*model).run(r->batch, *loss);
      for (const char* strategy : {"path", "blocks"})
        expect_exact(
            *model, flat, *r, make_plan(strategy, plan_request(r->batch, 16)), *loss,
            str(settings.loss, " ", settings.correction, " ",
                settings.teacher.is_used() ? settings.teacher.loss_mode : "", " ", strategy, " seed ", seed));
    }
  }
}

// The most likely tokens of each row, and the log-probabilities of given ones, in every plan.
TEST(Executor, TopAndGivenLogProbabilitiesAreTheFlatBatchs) {
  int64_t checked = 0;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const auto r = random_batch(seed, 150);
    if (r->batch.num_rows() == 0) continue;
    add_given_tokens(*r, seed);
    auto model = random_model(seed, at::kDouble);
    const FlatReference flat(*model);
    for (const char* strategy : kStrategies) {
      const auto values = Executor(*model, {.head_chunk_rows = 7})
                              .forward(make_plan(strategy, plan_request(r->batch, 16)), r->batch, 4);
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
          const auto given = log_p.index_select(0, r->batch.given_ids_RK[row]);
          EXPECT_LE((values.given_log_probs_RK[row] - given).abs().max().item<double>(), 1e-10);
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
  const auto result = Executor(*model).forward_backward(make_plan("path", plan_request(r.batch, 8)), r.batch,
                                                        *make_loss(settings));
  EXPECT_EQ(result.loss, 0);
  for (Parameter* parameter : model->parameters())
    EXPECT_EQ(parameter->main_grad.abs().max().item<double>(), 0);
}

}  // namespace
}  // namespace bough
