#include "plan/load_balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <limits>
#include <string>

#include "base/error.h"
#include "tree/random_tree.h"

namespace bough {
namespace {

using Sequences = std::vector<std::vector<int32_t>>;
using Balancer = std::vector<RankShare> (*)(const PrefixTree&, int64_t, const BalanceWeights&);

constexpr std::pair<const char*, Balancer> kBalancers[] = {
    {"intervals", balance_load}, {"by length", balance_by_length}, {"by tree cost", balance_by_tree_cost}};

PrefixTree tree_of(const Sequences& sequences, const std::vector<int64_t>& which) {
  std::vector<TokenSpan> spans;
  for (const int64_t s : which) spans.emplace_back(sequences[s]);
  return build_prefix_tree(spans);
}

double cost_of(const PrefixTree& tree, const BalanceWeights& weights) {
  double cost = 0;
  for (const int32_t depth : tree.depth) cost += weights.per_token + weights.per_pair * (depth + 1);
  return cost;
}

// Checks that each sequence is on one rank, and that counts and costs are those of the rank's prefix tree.
void expect_valid(const std::vector<RankShare>& shares, const Sequences& sequences, int64_t num_ranks,
                  const BalanceWeights& weights, const std::string& what) {
  ASSERT_EQ(std::ssize(shares), num_ranks) << what;
  std::vector<int> seen(sequences.size(), 0);
  for (const auto& share : shares) {
    ASSERT_TRUE(std::ranges::is_sorted(share.sequences)) << what;
    for (const int64_t s : share.sequences) ++seen[s];
    const auto tree = tree_of(sequences, share.sequences);
    ASSERT_EQ(share.num_tokens, tree.num_tokens()) << what;
    const double cost = cost_of(tree, weights);
    ASSERT_NEAR(share.cost, cost, 1e-9 * cost) << what;
  }
  for (size_t s = 0; s < seen.size(); ++s) ASSERT_EQ(seen[s], 1) << what << " sequence " << s;
}

int64_t total_tokens(const std::vector<RankShare>& shares) {
  int64_t sum = 0;
  for (const auto& share : shares) sum += share.num_tokens;
  return sum;
}

TEST(LoadBalance, SharesAreWholeAndRepeatAtMostAPathARank) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const auto sequences = random_sequences(seed, 400, seed % 2 ? 50 : 2);
    const auto tree = build_prefix_tree(as_spans(sequences));
    for (const int64_t num_ranks : {1, 2, 3, 8, 64})
      for (const BalanceWeights weights :
           {BalanceWeights{}, BalanceWeights{1, 0.01}, BalanceWeights{0.5, 3}}) {
        const auto what = str("seed ", seed, " ranks ", num_ranks, " pair weight ", weights.per_pair, " ");
        for (const auto& [name, balance] : kBalancers)
          expect_valid(balance(tree, num_ranks, weights), sequences, num_ranks, weights, what + name);
        const auto shares = balance_load(tree, num_ranks, weights);
        ASSERT_LE(total_tokens(shares), tree.num_tokens() + (num_ranks - 1) * longest_sequence(sequences))
            << what;
        if (num_ranks == 1) {
          ASSERT_EQ(total_tokens(shares), tree.num_tokens()) << what;
        }
      }
  }
}

// Compares with all ways to cut the lexicographically ordered leaves into K intervals.
TEST(LoadBalance, LargestCostIsTheLeastOfAllIntervals) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const auto sequences = random_sequences(seed, 300);
    const auto tree = build_prefix_tree(as_spans(sequences));
    auto leaves = sequences;  // sorted, without prefixes of other sequences and without duplicates
    std::ranges::sort(leaves);
    std::erase_if(leaves, [&](const auto& leaf) {
      return leaf.empty() || (&leaf < &leaves.back() &&
                              std::equal(leaf.begin(), leaf.end(), (&leaf)[1].begin(),
                                         (&leaf)[1].begin() + std::min(leaf.size(), (&leaf)[1].size())));
    });
    const size_t count = leaves.size();
    for (const BalanceWeights weights : {BalanceWeights{}, BalanceWeights{1, 0.05}}) {
      // least[n]: the least largest cost of the first n leaves on num_ranks ranks or fewer
      std::vector<double> least(count + 1, std::numeric_limits<double>::infinity());
      least[0] = 0;
      for (int64_t num_ranks = 1; num_ranks <= 5; ++num_ranks) {
        auto next = least;
        for (size_t begin = 0; begin < count; ++begin)
          for (size_t end = begin + 1; end <= count; ++end) {
            const Sequences interval(leaves.begin() + begin, leaves.begin() + end);
            const double cost = cost_of(build_prefix_tree(as_spans(interval)), weights);
            next[end] = std::min(next[end], std::max(least[begin], cost));
          }
        least = next;
        const double found = largest_cost(balance_load(tree, num_ranks, weights));
        ASSERT_NEAR(found, least[count], 1e-9 * least[count]) << "seed " << seed << " ranks " << num_ranks;
      }
    }
  }
}

TEST(LoadBalance, DoublesAndPrefixesStayTogetherAndRanksMayBeEmpty) {
  const Sequences sequences = {{1, 2, 3}, {1, 2, 3}, {1, 2}, {}, {9, 9}, {1, 2, 3}, {9}};
  const auto tree = build_prefix_tree(as_spans(sequences));
  const auto shares = balance_load(tree, 4);
  ASSERT_EQ(shares.size(), 4u);
  EXPECT_EQ(shares[0].sequences, (std::vector<int64_t>{0, 1, 2, 3, 5}));
  EXPECT_EQ(shares[0].num_tokens, 3);
  EXPECT_EQ(shares[1].sequences, (std::vector<int64_t>{4, 6}));
  EXPECT_TRUE(shares[2].sequences.empty());
  EXPECT_TRUE(shares[3].sequences.empty());
  for (const auto& [name, balance] : kBalancers) {
    EXPECT_THROW(balance(tree, 0, {}), UserError) << name;
    EXPECT_EQ(balance(build_prefix_tree({}), 3, {}).size(), 3u) << name;
    EXPECT_DOUBLE_EQ(largest_cost(balance(build_prefix_tree({}), 3, {})), 0) << name;
  }
}

// The long leaf determines the largest cost. The greedy check therefore puts all other leaves on the first
// rank. These leaves are then split such that the larger cost is least (90 into 40 and 50), so no rank stays
// idle.
TEST(LoadBalance, IntervalsAreSplitUntilEveryRankHasWork) {
  Sequences sequences = {std::vector<int32_t>(100, 99)};
  for (int32_t s = 0; s < 9; ++s) sequences.push_back(std::vector<int32_t>(10, s));
  const auto shares = balance_load(build_prefix_tree(as_spans(sequences)), 4);
  std::vector<int64_t> tokens;
  for (const auto& share : shares) tokens.push_back(share.num_tokens);
  EXPECT_EQ(tokens, (std::vector<int64_t>{40, 20, 30, 100}));
}

// Eight prompts of 512 tokens, each with 16 samples of about 256 tokens. Balancing by length computes each
// prompt on all ranks.
TEST(LoadBalance, GainOverBalancingByLength) {
  std::mt19937_64 random(4);
  Sequences sequences;
  for (int32_t prompt = 0; prompt < 8; ++prompt) {
    const std::vector<int32_t> head(512, prompt);
    for (int32_t sample = 0; sample < 16; ++sample) {
      sequences.push_back(head);
      sequences.back().insert(sequences.back().end(), 128 + random() % 256, 100 + sample);
    }
  }
  std::ranges::shuffle(sequences, random);
  const auto tree = build_prefix_tree(as_spans(sequences));
  for (const int64_t num_ranks : {2, 4, 8}) {
    const double ideal = static_cast<double>(tree.num_tokens()) / static_cast<double>(num_ranks);
    double largest[3];
    for (int i = 0; i < 3; ++i) {
      const auto shares = kBalancers[i].second(tree, num_ranks, {});
      largest[i] = largest_cost(shares);
      std::cout << num_ranks << " ranks, " << kBalancers[i].first << ": largest share " << largest[i] / ideal
                << " of an even one, " << total_tokens(shares) - tree.num_tokens()
                << " tokens computed again\n";
    }
    EXPECT_LT(largest[0], 1.1 * ideal);
    EXPECT_GT(largest[1], 1.08 * largest[0]);
    EXPECT_LE(largest[0], largest[2]);
  }
}

}  // namespace
}  // namespace bough
