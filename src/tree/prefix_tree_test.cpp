#include "tree/prefix_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

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
    // The tree has as many tokens as there are distinct prefixes.
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
  std::mt19937_64 random(9);
  for (uint64_t seed = 0; seed < 200; ++seed) {
    auto sequences = random_sequences(seed, 500, /*vocab=*/seed % 2 ? 50 : 2);
    std::sort(sequences.begin(), sequences.end());
    const auto tree = build_prefix_tree(as_spans(sequences));
    std::vector<size_t> order(sequences.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    std::vector<TokenSpan> shuffled;
    for (const size_t s : order) shuffled.emplace_back(sequences[s]);
    const auto other = build_prefix_tree(shuffled);
    ASSERT_EQ(tree.tokens, other.tokens) << "seed " << seed;
    ASSERT_EQ(tree.parent, other.parent);
    ASSERT_EQ(tree.depth, other.depth);
    ASSERT_EQ(tree.subtree_end, other.subtree_end);
    ASSERT_EQ(tree.num_sequences, other.num_sequences);
    ASSERT_EQ(tree.chain_begin, other.chain_begin);
    for (size_t i = 0; i < order.size(); ++i) ASSERT_EQ(other.sequence_end[i], tree.sequence_end[order[i]]);
  }
}

// prefix_tree.cpp compares kRun tokens at a time. These prefixes end near multiples of kRun.
TEST(PrefixTree, PrefixesOfEveryLengthAroundARunAreFound) {
  for (const int32_t length : {1, 2, 63, 64, 65, 66, 127, 128, 129, 193})
    for (const int32_t fork : {0, 1, 62, 63, 64, 65, 66, 127, 128, 129, 192}) {
      if (fork > length) continue;
      const std::vector<int32_t> base(length, 7);
      auto other = base;
      other.resize(fork);
      const auto prefix = other;
      other.insert(other.end(), 70, -3);
      const std::vector<TokenSpan> spans = {base, other, prefix, base};
      const auto tree = build_prefix_tree(spans);
      tree.check_integrity(spans);
      ASSERT_EQ(tree.num_tokens(), length + 70) << length << " " << fork;
    }
}

TEST(PrefixTree, AdversarialBatches) {
  const auto build = [](const std::vector<TokenSpan>& spans) {
    const auto tree = build_prefix_tree(spans);
    tree.check_integrity(spans);
    return tree;
  };
  EXPECT_EQ(build({}).num_tokens(), 0);
  const std::vector<int32_t> none;
  EXPECT_EQ(build(std::vector<TokenSpan>(1000, none)).num_tokens(), 0);
  const std::vector<int32_t> some(20, 3);
  const auto equal = build(std::vector<TokenSpan>(100'000, some));
  EXPECT_EQ(equal.num_tokens(), 20);
  EXPECT_EQ(equal.num_sequences[19], 100'000);
  const std::vector<int32_t> long_one(1'000'000, 3);
  EXPECT_EQ(build({long_one}).num_tokens(), 1'000'000);
  std::vector<int32_t> singles(100'000);
  std::iota(singles.begin(), singles.end(), 0);
  std::vector<TokenSpan> one_each;
  for (const auto& token : singles) one_each.emplace_back(&token, 1);
  EXPECT_EQ(build(one_each).num_tokens(), 100'000);
  std::vector<TokenSpan> nested;
  for (size_t n = 1100; n >= 1; --n) nested.emplace_back(long_one.data(), n);
  EXPECT_EQ(build(nested).num_tokens(), 1100);
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
  // pairs: 2·(1+2+3) in the flat batch, 1+2+3+3 in the tree
  EXPECT_DOUBLE_EQ(s.attention_compression, 12.0 / 9.0);
  EXPECT_EQ(s.num_leaves, 2);
  EXPECT_EQ(s.num_branch_points, 1);
  EXPECT_EQ(s.longest_path, 3);
  // If both last tokens are trained, W = (6·10 + 12·1 + 2·5) / (4·10 + 9·1 + 2·5).
  EXPECT_DOUBLE_EQ(count_work(tree, {1, 0, 1, 0, 0, 1}, {10, 5, 1}).ratio(), 82.0 / 59.0);
}

}  // namespace
}  // namespace bough
