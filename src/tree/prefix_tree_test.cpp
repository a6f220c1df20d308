#include "tree/prefix_tree.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tree/random_tree.h"

namespace bough {
namespace {

TEST(PrefixTree, SmallExampleIsNumberedInPreorderHeaviestFirst) {
  const std::vector<std::vector<int32_t>> sequences = {{1, 2, 3}, {1, 2, 4, 5, 6}, {1, 2}, {7},
                                                       {},        {1, 2, 3}};
  const auto spans = as_spans(sequences);
  const auto tree = build_prefix_tree(spans);
  tree.check_integrity(spans);
  EXPECT_EQ(tree.tokens, (std::vector<int32_t>{1, 2, 4, 5, 6, 3, 7}));
  EXPECT_EQ(tree.parent, (std::vector<int32_t>{-1, 0, 1, 2, 3, 1, -1}));
  EXPECT_EQ(tree.subtree_end, (std::vector<int32_t>{6, 6, 5, 5, 5, 6, 7}));
  EXPECT_EQ(tree.num_sequences, (std::vector<int32_t>{4, 4, 1, 1, 1, 2, 1}));
  EXPECT_EQ(tree.sequence_end, (std::vector<int32_t>{5, 4, 1, 6, -1, 5}));
}

TEST(PrefixTree, RandomTreesKeepTheirInvariants) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const auto sequences = random_sequences(seed, 400);
    const auto spans = as_spans(sequences);
    const auto tree = build_prefix_tree(spans);
    tree.check_integrity(spans);
    // As many tokens as there are distinct prefixes.
    std::set<std::vector<int32_t>> prefixes;
    for (const auto& s : sequences)
      for (size_t n = 1; n <= s.size(); ++n) prefixes.insert({s.begin(), s.begin() + n});
    ASSERT_EQ(tree.num_tokens(), static_cast<int64_t>(prefixes.size())) << "seed " << seed;
    build_flat_forest(spans).check_integrity(spans);
  }
}

TEST(PrefixTree, PathsAreFewRuns) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const auto sequences = random_sequences(seed, 2000);
    const auto tree = build_prefix_tree(as_spans(sequences));
    for (int64_t s = 0; s < tree.num_sequences_total(); ++s) {
      int runs = 0;
      for (int32_t t = tree.sequence_end[s]; t >= 0; t = tree.parent[tree.chain_begin[t]]) ++runs;
      EXPECT_LE(runs, std::log2(std::max<double>(1, tree.num_tokens())) + 1);
    }
  }
}

TEST(PrefixTree, VisibilityIsAncestry) {
  const auto sequences = random_sequences(5, 300);
  const auto tree = build_prefix_tree(as_spans(sequences));
  for (int32_t i = 0; i < tree.num_tokens(); ++i) {
    std::set<int32_t> ancestors;
    for (int32_t t = i; t >= 0; t = tree.parent[t]) ancestors.insert(t);
    for (int32_t j = 0; j < tree.num_tokens(); ++j)
      ASSERT_EQ(j <= i && i < tree.subtree_end[j], ancestors.count(j) == 1) << "key " << j << " query " << i;
  }
}

TEST(PrefixTree, OrderOfTheBatchDoesNotMatter) {
  auto sequences = random_sequences(9, 500);
  const auto tree = build_prefix_tree(as_spans(sequences));
  std::reverse(sequences.begin(), sequences.end());
  const auto reversed = build_prefix_tree(as_spans(sequences));
  EXPECT_EQ(tree.tokens, reversed.tokens);
  EXPECT_EQ(tree.subtree_end, reversed.subtree_end);
}

TEST(PrefixTree, DeepNestingNeedsNoRecursion) {
  std::vector<int32_t> longest(10000);
  for (size_t i = 0; i < longest.size(); ++i) longest[i] = static_cast<int32_t>(i % 7);
  std::vector<TokenSpan> spans;
  for (size_t n = 1; n <= longest.size(); ++n) spans.emplace_back(longest.data(), n);
  const auto tree = build_prefix_tree(spans);
  EXPECT_EQ(tree.num_tokens(), 10000);
  EXPECT_EQ(tree.num_sequences[0], 10000);
  EXPECT_EQ(tree.num_flat_tokens(), 50005000);
}

TEST(TreeStatistics, CountsBySmallExample) {
  const std::vector<std::vector<int32_t>> sequences = {{1, 2, 3}, {1, 2, 4}};
  const auto tree = build_prefix_tree(as_spans(sequences));
  const auto s = compute_statistics(tree);
  EXPECT_EQ(s.num_flat_tokens, 6);
  EXPECT_EQ(s.num_tree_tokens, 4);
  EXPECT_DOUBLE_EQ(s.compression, 1.5);
  EXPECT_DOUBLE_EQ(s.attention_compression, 12.0 / 9.0);  // pairs: 2·(1+2+3) against 1+2+3+3
  EXPECT_EQ(s.num_leaves, 2);
  EXPECT_EQ(s.num_branch_points, 1);
  EXPECT_EQ(s.longest_path, 3);
  // Both last tokens trained: W = (6·10 + 12·1 + 2·5) / (4·10 + 9·1 + 2·5).
  EXPECT_DOUBLE_EQ(work_ratio(tree, {1, 0, 1, 0, 0, 1}, {10, 5, 1}), 82.0 / 59.0);
}

}  // namespace
}  // namespace bough
