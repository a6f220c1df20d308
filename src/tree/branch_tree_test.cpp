#include "tree/branch_tree.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tree/random_tree.h"

namespace bough {
namespace {

int32_t common_prefix(TokenSpan a, TokenSpan b) {
  return static_cast<int32_t>(std::ranges::mismatch(a, b).in1 - a.begin());
}

TEST(BranchTree, NodesAreStretchesBetweenBranchPoints) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const auto sequences = random_sequences(seed, 400, seed % 2 ? 50 : 2);
    const auto tree = build_prefix_tree(as_spans(sequences));
    const BranchTree branches(tree);
    std::vector<int32_t> num_children(tree.num_tokens(), 0);
    for (const int32_t p : tree.parent)
      if (p >= 0) ++num_children[p];
    int32_t next = 0;
    for (int32_t n = 0; n < branches.size(); ++n) {
      const auto& node = branches.nodes[n];
      ASSERT_EQ(node.begin, next) << "seed " << seed;
      ASSERT_EQ(node.depth, tree.depth[node.end - 1] + 1);
      for (int32_t t = node.begin; t + 1 < node.end; ++t) {
        ASSERT_EQ(num_children[t], 1) << "token " << t << " inside a node";
        ASSERT_EQ(tree.parent[t + 1], t);
      }
      ASSERT_NE(num_children[node.end - 1], 1) << "token " << node.end - 1 << " ends a node";
      ASSERT_EQ(node.num_children, num_children[node.end - 1]);
      ASSERT_EQ(node.parent < 0 ? -1 : branches.nodes[node.parent].end - 1, tree.parent[node.begin]);
      ASSERT_EQ(static_cast<int32_t>(branches.children(n).size()), node.num_children);
      for (const int32_t child : branches.children(n)) ASSERT_EQ(branches.nodes[child].parent, n);
      next = node.end;
    }
    ASSERT_EQ(next, tree.num_tokens());
  }
}

TEST(BranchTree, VisitsLeavesWithTheirCommonPrefixes) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const auto sequences = random_sequences(seed, 400, seed % 2 ? 50 : 2);
    const auto tree = build_prefix_tree(as_spans(sequences));
    BranchTree branches(tree);
    for (const bool lexicographic : {false, true}) {
      if (lexicographic) branches.sort_lexicographically();
      const auto members = branches.sequences_of_leaves();
      TokenSpan previous;
      int64_t added = 0;
      for (const auto& visit : branches.visit()) {
        ASSERT_FALSE(members[visit.node].empty());
        TokenSpan leaf;
        for (const int64_t s : members[visit.node])
          if (sequences[s].size() > leaf.size()) leaf = sequences[s];
        ASSERT_EQ(static_cast<int32_t>(leaf.size()), visit.length);
        for (const int64_t s : members[visit.node])
          ASSERT_EQ(common_prefix(sequences[s], leaf), std::ssize(sequences[s]));
        ASSERT_EQ(common_prefix(previous, leaf), visit.lcp) << "seed " << seed;
        if (lexicographic) {
          ASSERT_TRUE(std::ranges::lexicographical_compare(previous, leaf));
        }
        added += visit.length - visit.lcp;
        previous = leaf;
      }
      ASSERT_EQ(added, tree.num_tokens());
    }
    for (size_t s = 0; s < sequences.size(); ++s)
      ASSERT_EQ(branches.sequence_leaf[s] < 0, sequences[s].empty());
  }
}

}  // namespace
}  // namespace bough
