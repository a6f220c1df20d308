#include "plan/dta_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/error.h"
#include "tree/random_tree.h"

namespace bough {
namespace {

using Kind = DtaPass::Kind;

int64_t tokens_of(const DtaSchedule& schedule, Kind kind) {
  int64_t sum = 0;
  for (const auto& pass : schedule.passes)
    if (pass.kind == kind) sum += pass.num_tokens;
  return sum;
}

TEST(DtaSchedule, GroupOfSamplesByHand) {
  // A prompt of 3 tokens with samples of 2, 1 and 3 tokens.
  const std::vector<std::vector<int32_t>> sequences = {
      {1, 2, 3, 4, 5}, {1, 2, 3, 6}, {1, 2, 3, 7, 8, 9}, {1, 2}};
  const auto tree = build_prefix_tree(as_spans(sequences));
  const auto schedule = simulate_dta(tree);
  // The first pass caches the prompt's keys and values. Then the longest sample runs. The prompt's backward
  // is in one pass with the shortest sample, which comes last.
  struct Expected {
    Kind kind;
    int32_t leaf;
    int64_t prefix, tokens;
  };
  const std::vector<Expected> expected = {{Kind::kForward, 0, 0, 3},
                                          {Kind::kForwardBackward, 0, 3, 3},
                                          {Kind::kForwardBackward, 1, 3, 2},
                                          {Kind::kForwardBackward, 2, 0, 4}};
  ASSERT_EQ(schedule.passes.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(schedule.passes[i].kind, expected[i].kind) << i;
    EXPECT_EQ(schedule.passes[i].leaf, expected[i].leaf) << i;
    EXPECT_EQ(schedule.passes[i].num_prefix_tokens, expected[i].prefix) << i;
    EXPECT_EQ(schedule.passes[i].num_tokens, expected[i].tokens) << i;
  }
  EXPECT_EQ(schedule.tokens_forwarded, 12);
  EXPECT_EQ(schedule.tokens_recomputed, 3);
  EXPECT_EQ(schedule.num_leaves, 3);
  EXPECT_EQ(schedule.peak_stack_tokens, 6);
  EXPECT_EQ(schedule.peak_pass_tokens, 4);
  EXPECT_DOUBLE_EQ(schedule.effective_compression, 17.0 / 12);
  EXPECT_EQ(simulate_dta(tree, {.variant = DtaVariant::kWholeSuffix}).tokens_forwarded, 18);
  EXPECT_EQ(simulate_dta(tree, {.variant = DtaVariant::kPrinted}).tokens_forwarded, 21);
  // The last pop, of 4 tokens, runs in two chunks of 2, so the 2 tokens before the last chunk need cached
  // keys and values.
  EXPECT_EQ(simulate_dta(tree, {.block_size = 2}).peak_pass_tokens, 2);
}

// Executes the schedule and checks: each pass reads only cached tokens, chunks are popped from the top of the
// stack, and every tree token has exactly one backward.
TEST(DtaSchedule, EachPassFindsItsPrefixCached) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const auto sequences = random_sequences(seed, 500, seed % 2 ? 50 : 3);
    const auto tree = build_prefix_tree(as_spans(sequences));
    const auto statistics = compute_statistics(tree);
    for (const int64_t block : {1, 5, 64, 100'000})
      for (const auto variant : {DtaVariant::kReleased, DtaVariant::kWholeSuffix, DtaVariant::kPrinted})
        for (const auto order : {DtaOrder::kBackward, DtaOrder::kLexicographic}) {
          const auto schedule = simulate_dta(tree, {block, variant, order});
          int64_t cached = 0, top = 0;
          int32_t leaf = -1;
          for (const auto& pass : schedule.passes) {
            const int64_t end = pass.num_prefix_tokens + pass.num_tokens;
            ASSERT_LE(pass.num_prefix_tokens, cached) << "seed " << seed << " block " << block;
            if (pass.kind == Kind::kForward) {
              cached = std::max(cached, end);
              continue;
            }
            ASSERT_LE(pass.num_tokens, block);
            if (pass.leaf == leaf) {
              ASSERT_EQ(end, top) << "a chunk is not on top";
            } else {
              ASSERT_GT(end, top) << "a leaf adds nothing";
            }
            leaf = pass.leaf;
            top = pass.num_prefix_tokens;
            cached = std::min(cached, top);
          }
          ASSERT_EQ(top, 0);
          ASSERT_EQ(tokens_of(schedule, Kind::kForwardBackward), tree.num_tokens());
          ASSERT_EQ(schedule.num_leaves, statistics.num_leaves);
          ASSERT_EQ(schedule.peak_stack_tokens, statistics.longest_path);
          ASSERT_EQ(schedule.tokens_recomputed, tokens_of(schedule, Kind::kForward));
        }
  }
}

// Expected values: tokens without a graph and the sum of prefix lengths, from get_stats("backward", B) of the
// released code (areal/experimental/dta/trie.py) for the same batches. A full comparison of 1,995 random
// cases found no difference; the test keeps twelve cases.
TEST(DtaSchedule, CountsAreThoseOfTheReleasedCode) {
  struct Case {
    uint64_t seed;
    int64_t block, forward_tokens, sum_prefix;
  };
  for (const auto& [seed, block, forward_tokens, sum_prefix] : {Case{1, 3, 295, 5462},
                                                                {1, 16, 242, 924},
                                                                {1, 100, 83, 125},
                                                                {2, 3, 79, 416},
                                                                {2, 16, 43, 74},
                                                                {2, 100, 20, 37},
                                                                {7, 3, 77, 309},
                                                                {7, 16, 17, 55},
                                                                {7, 100, 17, 55},
                                                                {11, 3, 388, 4241},
                                                                {11, 16, 265, 782},
                                                                {11, 100, 66, 130}}) {
    const auto sequences = random_sequences(seed, 600, seed % 2 ? 50 : 3);
    const auto schedule = simulate_dta(build_prefix_tree(as_spans(sequences)), {.block_size = block});
    EXPECT_EQ(tokens_of(schedule, Kind::kForward), forward_tokens) << "seed " << seed << " block " << block;
    int64_t sum = 0;
    for (const auto& pass : schedule.passes)
      if (pass.kind == Kind::kForwardBackward) sum += pass.num_prefix_tokens;
    EXPECT_EQ(sum, sum_prefix) << "seed " << seed << " block " << block;
  }
}

// Algorithm 1 saves passes. Without a limit on chunks, both orders cache each interior token once.
TEST(DtaSchedule, BackwardOrderCachesInFewerPasses) {
  int64_t passes[2] = {}, recomputed[2] = {};
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const auto tree = build_prefix_tree(as_spans(random_sequences(seed, 500)));
    for (const auto order : {DtaOrder::kBackward, DtaOrder::kLexicographic}) {
      const auto schedule = simulate_dta(tree, {.order = order});
      passes[static_cast<size_t>(order)] +=
          std::ranges::count(schedule.passes, Kind::kForward, &DtaPass::kind);
      recomputed[static_cast<size_t>(order)] += schedule.tokens_recomputed;
    }
  }
  EXPECT_LT(1.4 * passes[0], passes[1]);
  EXPECT_EQ(recomputed[0], recomputed[1]);
}

TEST(DtaSchedule, EmptyAndDeepBatches) {
  EXPECT_TRUE(simulate_dta(build_prefix_tree({})).passes.empty());
  EXPECT_THROW(simulate_dta(build_prefix_tree({}), {.block_size = 0}), UserError);
  const std::vector<int32_t> path(10'000, 1);
  std::vector<TokenSpan> nested;
  for (size_t n = 1; n <= path.size(); ++n) nested.emplace_back(path.data(), n);
  const auto schedule = simulate_dta(build_prefix_tree(nested), {.block_size = 2048});
  EXPECT_EQ(schedule.passes.size(), 6u);  // five chunks of 2,000 tokens; the first four are cached beforehand
  EXPECT_EQ(schedule.tokens_forwarded, 18'000);
}

}  // namespace
}  // namespace bough
