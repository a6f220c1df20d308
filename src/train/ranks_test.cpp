// Data parallelism against one rank: threads of this process, each with a copy of the model.
#include "train/ranks.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <thread>

#include "algo/loss.h"
#include "plan/test_costs.h"
#include "train/exactness.h"

namespace bough {
namespace {

// Ranks are threads here.
const bool one_thread = (at::set_num_threads(1), true);

struct RankResult {
  WalkResult walk;
  std::unique_ptr<Model> model;
  int64_t num_tokens = 0;
};

std::vector<RankResult> on_ranks(int64_t num_ranks, uint64_t seed, const RandomBatch& r, const Loss& loss) {
  auto ranks = thread_communicators(num_ranks);
  std::vector<RankResult> results(static_cast<size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < num_ranks; ++rank)
    threads.emplace_back([&, rank] {
      RankResult& result = results[static_cast<size_t>(rank)];
      Communicator& group = *ranks[static_cast<size_t>(rank)];
      group.set_deadline(60);
      result.model = random_model(seed, at::kDouble);
      result.model->allocate_gradients();
      const char* const strategy = (seed + static_cast<uint64_t>(rank)) % 2 == 0 ? "blocks" : "path";
      const Plan plan = plan_share(strategy, plan_request(r.batch, 32), rank, num_ranks);
      result.num_tokens = num_planned_tokens(plan);
      result.walk = Executor(*result.model, {.ranks = &group}).forward_backward(plan, r.batch, loss);
      sum_gradients(*result.model, group);
    });
  for (std::thread& thread : threads) thread.join();
  return results;
}

TEST(Ranks, HaveTheFlatBatchsGradientWhateverTheirNumber) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const auto r = random_batch(seed, 100);
    // One loss in three couples the tokens of a sequence.
    LossSettings settings;
    settings.loss = seed % 3 == 0 ? "gspo" : "ppo";
    settings.entropy_coef = 0.1;
    settings.kl_loss_coef = 0.05;
    const auto loss = make_loss(settings);
    const auto model = random_model(seed, at::kDouble);
    FlatResult flat = FlatReference(*model).run(r->batch, *loss);
    const int64_t num_ranks = int64_t{1} << (seed % 4);
    const auto results = on_ranks(num_ranks, seed, *r, *loss);
    for (const RankResult& rank : results) {
      ASSERT_NEAR(rank.walk.loss, flat.loss, 1e-10 * std::max(1.0, std::abs(flat.loss))) << seed;
      ASSERT_LE(gradient_error(*rank.model, flat), 1e-10) << num_ranks << " ranks, seed " << seed;
      if (r->batch.num_rows() > 0) {
        ASSERT_LE((rank.walk.values.log_probs_R - flat.log_probs_R).abs().max().item<double>(), 1e-10)
            << seed;
      }
      ASSERT_EQ(rank.walk.metrics.size(), results[0].walk.metrics.size()) << seed;
      for (const auto& [name, metric] : rank.walk.metrics)
        ASSERT_EQ(metric.value(), results[0].walk.metrics.at(name).value()) << name;
    }
    // What is cut is computed again at the cuts only: at most one path each.
    int64_t tokens = 0, longest = 0;
    for (const RankResult& rank : results) tokens += rank.num_tokens;
    for (const TokenSpan& sequence : r->batch.sequences)
      longest = std::max<int64_t>(longest, std::ssize(sequence));
    const int64_t tree = build_prefix_tree(r->batch.sequences).num_tokens();
    ASSERT_LE(tokens, tree + (num_ranks - 1) * longest) << seed;
  }
}

TEST(Ranks, MetricsAreThoseOfTheWholeBatch) {
  const auto r = random_batch(7, 100);
  const auto loss = full_loss();
  const auto one = on_ranks(1, 7, *r, *loss), four = on_ranks(4, 7, *r, *loss);
  ASSERT_FALSE(one[0].walk.metrics.empty());
  for (const auto& [name, metric] : one[0].walk.metrics)
    EXPECT_NEAR(four[3].walk.metrics.at(name).value(), metric.value(),
                1e-9 * std::max(1.0, std::abs(metric.value())))
        << name;
}

TEST(Ranks, TheCutFollowsWhatTokensAndPairsCost) {
  EXPECT_EQ(balance_weights(nullptr).per_pair, 0);
  const TestCosts costs;
  const BalanceWeights weights = balance_weights(&costs);
  EXPECT_GT(weights.per_token, 0);
  EXPECT_GE(weights.per_pair, 0);
}

}  // namespace
}  // namespace bough
