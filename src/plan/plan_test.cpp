#include "plan/plan.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "tree/random_tree.h"

namespace bough {
namespace {

TEST(Plan, RandomBatchesGiveValidPlansForEveryPassSize) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const auto sequences = random_sequences(seed, 300);
    const auto spans = as_spans(sequences);
    for (const int64_t limit : {1, 2, 7, 64, 4096})
      for (const char* strategy : {"dense", "path", "blocks"}) {
        const auto plan = make_plan(strategy, {.sequences = spans, .max_tokens_per_pass = limit});
        ASSERT_NO_THROW(validate(plan, spans)) << strategy << " seed " << seed << " limit " << limit;
      }
  }
}

TEST(Plan, PathHoldsOnePathAndRecomputesOnlyInteriorTokens) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const auto sequences = random_sequences(seed, 1000);
    const auto spans = as_spans(sequences);
    const auto plan = make_plan("path", {.sequences = spans, .max_tokens_per_pass = 32});
    const auto result = simulate(plan);
    const auto statistics = compute_statistics(*plan.trees[0].tree);
    EXPECT_LE(result.peak_stack_tokens, statistics.longest_path);
    EXPECT_LE(result.peak_pass_tokens, 32);
    // A sequence of one token that nothing hangs off trains nothing, and is not run.
    EXPECT_LE(result.tokens_forwarded, statistics.num_tree_tokens);
    EXPECT_GE(result.tokens_forwarded, statistics.num_tree_tokens - statistics.num_sequences);
    EXPECT_LT(result.tokens_recomputed, std::max<int64_t>(1, statistics.num_tree_tokens));
  }
}

TEST(Plan, GroupOfSamplesIsAPromptAndALeafEach) {
  const std::vector<std::vector<int32_t>> sequences = {{1, 2, 3, 4, 5}, {1, 2, 3, 6}, {1, 2, 3, 7, 8, 9}};
  const auto spans = as_spans(sequences);
  const auto plan = make_plan("path", {.sequences = spans, .max_tokens_per_pass = 100});
  ASSERT_EQ(plan.trees[0].blocks.size(), 4u);
  EXPECT_TRUE(plan.trees[0].blocks[0].interior);
  EXPECT_EQ(plan.trees[0].blocks[0].num_tokens, 3);
  EXPECT_EQ(plan.trees[0].blocks[1].num_tokens, 3);  // longest tail first
  EXPECT_EQ(plan.trees[0].steps.back().kind, Step::Kind::kBackward);
  EXPECT_EQ(simulate(plan).tokens_recomputed, 3);
  const auto dense = make_plan("dense", {.sequences = spans, .max_tokens_per_pass = 10});
  ASSERT_EQ(dense.trees[0].blocks.size(), 2u);  // 5 + 4, then 6
  EXPECT_EQ(dense.trees[0].blocks[0].num_tokens, 9);
  EXPECT_EQ(simulate(dense).tokens_recomputed, 0);
}

TEST(Plan, BrokenPlansAreFound) {
  const auto sequences = random_sequences(3, 200);
  const auto spans = as_spans(sequences);
  const auto good = make_plan("path", {.sequences = spans, .max_tokens_per_pass = 16});
  auto lost_step = good;
  lost_step.trees[0].steps.pop_back();
  EXPECT_THROW(validate(lost_step, spans), InternalError);
  auto lost_block = good;
  lost_block.trees[0].blocks.back().ranges[0].end -= 1;
  EXPECT_THROW(validate(lost_block, spans), InternalError);
  auto swapped = good;
  std::swap(swapped.trees[0].steps.front(), swapped.trees[0].steps.back());
  EXPECT_THROW(validate(swapped, spans), InternalError);
  auto twice = good;
  twice.trees.push_back(good.trees[0]);
  EXPECT_THROW(validate(twice, spans), InternalError);
}

TEST(Plan, UnknownStrategyAndEmptyPassAreRefused) {
  EXPECT_THROW(make_plan("forest", {}), UserError);
  EXPECT_THROW(make_plan("dense", {.max_tokens_per_pass = 0}), UserError);
}

}  // namespace
}  // namespace bough
