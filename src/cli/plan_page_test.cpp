#include "cli/plan_page.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tree/random_tree.h"

namespace bough {
namespace {

TEST(PlanPage, EverySequenceStandsInOneTreeAndEveryTokenInItsBlock) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const auto sequences = random_sequences(seed, 300);
    const auto spans = as_spans(sequences);
    for (const int64_t limit : {7, 64, 4096})
      for (const char* strategy : {"dense", "packed", "path", "blocks"}) {
        if (strategy == std::string("packed") && limit < 4096) continue;  // packed refuses longer paths
        const auto plan = make_plan(strategy, {.sequences = spans, .max_tokens_per_pass = limit});
        const auto picture = plan_picture(plan, strategy);
        ASSERT_EQ(picture.trees.size(), plan.trees.size());
        std::vector<int64_t> tokens(picture.blocks.size());
        std::vector<int64_t> lengths;  // of the paths in the picture
        for (const auto& tree : picture.trees) {
          const size_t first = lengths.size();
          for (const auto& node : tree.nodes) {
            tokens[static_cast<size_t>(node.block)] += node.end - node.begin;
            const size_t end = first + static_cast<size_t>(node.first_sequence + node.num_sequences);
            lengths.resize(std::max(lengths.size(), end));
            for (size_t s = first + static_cast<size_t>(node.first_sequence); s < end; ++s)
              lengths[s] += node.end - node.begin;
          }
        }
        int64_t last_pass = 0;
        for (size_t b = 0; b < tokens.size(); ++b) {
          ASSERT_EQ(tokens[b], picture.blocks[b].num_tokens)
              << strategy << " seed " << seed << " block " << b;
          last_pass = std::max(last_pass, picture.blocks[b].backward_pass);
        }
        EXPECT_EQ(last_pass, simulate(plan).num_passes);
        std::vector<int64_t> expected;
        for (const auto& sequence : sequences)
          if (!sequence.empty()) expected.push_back(static_cast<int64_t>(sequence.size()));
        std::sort(lengths.begin(), lengths.end());
        std::sort(expected.begin(), expected.end());
        EXPECT_EQ(lengths, expected) << strategy << " seed " << seed << " limit " << limit;
        EXPECT_NO_THROW(plan_svg(picture)) << strategy << " seed " << seed << " limit " << limit;
      }
  }
}

TEST(PlanPage, BlocksStandInTheOrderOfTheirForwardPasses) {
  const std::vector<std::vector<int32_t>> sequences = {{1, 2, 3, 4, 5}, {1, 2, 3, 6}, {1, 2, 3, 7, 8, 9}};
  const auto spans = as_spans(sequences);
  auto plan = make_plan("path", {.sequences = spans, .max_tokens_per_pass = 100});
  plan.trees[0].blocks[0].keep = RecomputePolicy::kAttention;
  auto picture = plan_picture(plan, "path");
  ASSERT_EQ(picture.blocks.size(), 4u);
  EXPECT_TRUE(picture.blocks[0].interior);
  EXPECT_EQ(picture.blocks[0].keep, PlanPictureBlock::RecomputePolicy::kAttention);
  EXPECT_EQ(picture.blocks[0].forward_pass, 1);
  EXPECT_EQ(picture.blocks[0].backward_pass, 5);
  for (int64_t b = 1; b < 4; ++b) {
    EXPECT_EQ(picture.blocks[static_cast<size_t>(b)].forward_pass, b + 1);
    EXPECT_EQ(picture.trees[0].nodes[static_cast<size_t>(b)].num_sequences, 1);
    EXPECT_EQ(picture.trees[0].nodes[static_cast<size_t>(b)].parent, 0);
  }
  for (const RecomputePolicy keep :
       {RecomputePolicy::kLayerInputsAndAttention, RecomputePolicy::kLayerInputsOnHost}) {
    plan.trees[0].blocks[0].keep = keep;
    picture = plan_picture(plan, "path");
    EXPECT_EQ(picture.blocks[0].keep, PlanPictureBlock::RecomputePolicy::kLayerInputs);
  }
}

}  // namespace
}  // namespace bough
