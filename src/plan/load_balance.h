// Load balance: a batch over K ranks (papers/areal-dta.txt, section 4 and Algorithm 4).
//
// Each rank plans and computes its own prefix tree, so that a prefix that sequences of several ranks share is
// computed on each. Leaves stand in lexicographic order, a depth-first order of the tree; each rank takes an
// interval, so that at most K - 1 paths are computed again: K - 1 times the longest path in tokens. The cost
// of an interval is additive: the whole path of its first leaf, and of each further leaf what it does not
// share with the one before.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tree/prefix_tree.h"

namespace bough {

// What a tree token costs, and what a (query, key) pair of its attention; seconds, FLOPs or any other unit.
struct BalanceWeights {
  double per_token = 1;
  double per_pair = 0;  // a token at depth d (from 0) sees d + 1 keys
};

struct RankShare {
  std::vector<int64_t> sequences;  // the batch's indices, ascending; may be empty
  int64_t num_tokens = 0;          // tree tokens of these sequences
  double cost = 0;
};

// Algorithm 4: intervals of least largest cost, by binary search with a greedy check; then the costliest
// interval of two leaves or more is split until there are K, which lowers no one's cost but its own.
// Sequences that are prefixes of others, and equal ones, go with a leaf that has them; so ranks stay empty
// where there are fewer leaves than K. Empty sequences go to rank 0. O(S (log S + K)). UserError for fewer
// than 1 rank.
std::vector<RankShare> balance_load(const PrefixTree& tree, int64_t num_ranks,
                                    const BalanceWeights& weights = {});

// What other trainers do: longest sequence first, each to the rank with fewest tokens so far, blind to
// prefixes; costs are those of the prefix trees that come of it. For comparison.
std::vector<RankShare> balance_by_length(const PrefixTree& tree, int64_t num_ranks,
                                         const BalanceWeights& weights = {});

// DTA's other baseline (Figures 7 to 9): leaves in lexicographic order, each to the rank of least cost so
// far.
std::vector<RankShare> balance_by_tree_cost(const PrefixTree& tree, int64_t num_ranks,
                                            const BalanceWeights& weights = {});

// Cost of the largest share; 0 for none. The step takes as long as it does.
double largest_cost(const std::vector<RankShare>& shares);

// What the step takes where only the leaves' costs are known: that of each by itself, and behind the leaf
// before it. 0 for no leaves.
double largest_balanced_cost(std::span<const double> whole, std::span<const double> added, int64_t num_ranks);

}  // namespace bough
