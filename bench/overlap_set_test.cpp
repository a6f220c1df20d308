#include "overlap_set.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "data/rollout_file.h"
#include "tree/prefix_tree.h"

namespace bough_bench {
namespace {

bough::TreeStatistics statistics_of(const std::vector<bough::Trajectory>& rollouts) {
  std::vector<bough::TokenSpan> sequences;
  for (const auto& rollout : rollouts) sequences.emplace_back(rollout.input_ids);
  return compute_statistics(bough::build_prefix_tree(sequences));
}

// Two effects change the ratio by less than one token per leaf: a leaf's share of its base is cut to whole
// tokens, and a branch may by chance begin with the same token as its sibling.
TEST(OverlapSet, AWrittenSetHasTheRatioThatWasAskedFor) {
  const std::string file = testing::TempDir() + "/overlap.jsonl.zst";
  int64_t tokens = 0;
  for (const double por : {0.2, 0.28, 0.5, 0.705, 0.887, 0.92}) {
    const OverlapSettings settings{.out = file, .por = por, .leaves = 64, .mean_length = 500};
    bough::write_rollouts(file, overlap_rollouts(settings));
    const auto rollouts = bough::read_rollouts(file, {.vocab_size = settings.vocab});
    const auto statistics = statistics_of(rollouts);
    EXPECT_EQ(statistics.num_leaves, 64);
    const double rounding = 64.0 / static_cast<double>(statistics.num_flat_tokens);
    EXPECT_NEAR(statistics.potential_overlap_ratio, por, rounding);
    if (tokens == 0) tokens = statistics.num_flat_tokens;
    EXPECT_EQ(statistics.num_flat_tokens, tokens);  // constant, as in the paper
    for (const auto& rollout : rollouts) {
      EXPECT_TRUE(rollout.in_loss() && rollout.trains_a_token());
      EXPECT_EQ(rollout.num_generated(), std::ssize(rollout.input_ids) - 1);
      EXPECT_EQ(rollout.advantage.size(), 1u);
    }
  }
}

TEST(OverlapSet, TheSeedDeterminesTheSet) {
  const OverlapSettings settings{.out = "x", .por = 0.6, .leaves = 8, .mean_length = 50};
  OverlapSettings other = settings;
  other.seed = 2;
  const auto ids = [](const OverlapSettings& s) { return overlap_rollouts(s).front().input_ids; };
  EXPECT_EQ(ids(settings), ids(settings));
  EXPECT_NE(ids(settings), ids(other));
}

TEST(OverlapSet, RefusesARatioThatNoSetHas) {
  EXPECT_THROW(bough::parse_settings<OverlapSettings>("{}", "test", {"out=x", "por=1.2"}), bough::UserError);
}

}  // namespace
}  // namespace bough_bench
