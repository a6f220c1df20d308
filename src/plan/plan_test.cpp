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
    // A sequence of one token without descendants trains nothing and is not run.
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
  EXPECT_EQ(plan.trees[0].blocks[1].num_tokens, 3);  // the longest tail is first
  EXPECT_EQ(plan.trees[0].steps.back().kind, Step::Kind::kBackward);
  EXPECT_EQ(simulate(plan).tokens_recomputed, 3);
  const auto dense = make_plan("dense", {.sequences = spans, .max_tokens_per_pass = 10});
  ASSERT_EQ(dense.trees[0].blocks.size(), 2u);  // 6 tokens, then 5 + 4
  EXPECT_EQ(dense.trees[0].blocks[0].num_tokens, 6);
  EXPECT_EQ(dense.trees[0].blocks[1].num_tokens, 9);
  EXPECT_EQ(simulate(dense).tokens_recomputed, 0);
}

// Two prompts of 4 tokens. The flat batch has 31 tokens. The trees have 4 + 3 + 2 and 4 + 3 + 2 + 1 tokens.
TEST(Plan, ReusedTokensAreThoseThatNoTreeRepeats) {
  const std::vector<std::vector<int32_t>> sequences = {
      {1, 1, 1, 1, 2, 2, 2}, {5, 5, 5, 5, 6, 6, 6}, {1, 1, 1, 1, 3, 3}, {5, 5, 5, 5, 7, 7}, {5, 5, 5, 5, 8}};
  const auto spans = as_spans(sequences);
  const auto reuse = [&](const char* strategy, int64_t limit, const char* packer = "auto") {
    const auto plan =
        make_plan(strategy, {.sequences = spans, .max_tokens_per_pass = limit, .packer = packer});
    validate(plan, spans);
    return effective_reuse_ratio(num_planned_tokens(plan), 31);
  };
  const double por = compute_statistics(build_prefix_tree(spans)).potential_overlap_ratio;
  EXPECT_DOUBLE_EQ(por, 1 - 19.0 / 31);
  EXPECT_DOUBLE_EQ(reuse("dense", 100), 0);
  EXPECT_DOUBLE_EQ(reuse("path", 3), por);  // tokens that a second forward recomputes do not count
  EXPECT_DOUBLE_EQ(reuse("blocks", 100), por);
  EXPECT_DOUBLE_EQ(reuse("packed", 100), por);
  EXPECT_DOUBLE_EQ(reuse("packed", 10), por);                    // one tree per prompt
  EXPECT_DOUBLE_EQ(reuse("packed", 9), 1 - (9.0 + 9 + 5) / 31);  // the second prompt is computed twice
  EXPECT_DOUBLE_EQ(reuse("packed", 18, "first_fit_decreasing"), 1 - (18.0 + 5) / 31);
  EXPECT_DOUBLE_EQ(reuse("packed", 17, "heuristic"), 1 - (17.0 + 6) / 31);
  EXPECT_DOUBLE_EQ(effective_reuse_ratio(0, 0), 0);
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
  EXPECT_THROW(make_plan("dense", {.packer = "worst"}), UserError);
}

}  // namespace
}  // namespace bough
