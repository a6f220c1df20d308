// Load balance: splits a batch over K ranks (AReaL-DTA, arXiv 2602.00482, section 4 and Algorithm 4).
//
// Each rank plans and computes the prefix tree of its own sequences. A prefix common to sequences of several
// ranks is computed on each of these ranks. Leaves are in lexicographic order, which is a depth-first order
// of the tree. Each rank takes an interval of leaves, so at most K - 1 paths are computed again.
//
// The cost of an interval is the cost of the whole path of its first leaf, plus, for each further leaf, the
// cost of the tokens that it does not share with the leaf before.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tree/prefix_tree.h"

namespace bough {

// Cost of a tree token and of a (query, key) pair of its attention, in seconds, FLOPs or any other unit.
struct BalanceWeights {
  double per_token = 1;
  double per_pair = 0;  // a token at depth d (from 0) sees d + 1 keys
};

struct RankShare {
  std::vector<int64_t> sequences;  // the batch's indices, ascending; may be empty
  int64_t num_tokens = 0;          // tree tokens of these sequences
  double cost = 0;
};

// Algorithm 4. A binary search with a greedy check minimizes the largest interval cost. If the result has
// fewer than K intervals, the costliest interval with at least two leaves is split, until there are K.
//   - A sequence that equals a leaf's path or is a prefix of it goes to the rank of that leaf.
//   - If there are fewer than K leaves, some ranks get no sequences.
//   - Empty sequences go to rank 0.
// O(S (log S + K)). Throws UserError if num_ranks is below 1.
std::vector<RankShare> balance_load(const PrefixTree& tree, int64_t num_ranks,
                                    const BalanceWeights& weights = {});

// For comparison: the usual method, which ignores prefixes. Sequences go longest first to the rank with the
// fewest flat tokens so far. The returned costs are those of the ranks' prefix trees.
std::vector<RankShare> balance_by_length(const PrefixTree& tree, int64_t num_ranks,
                                         const BalanceWeights& weights = {});

// The second baseline of DTA (Figures 7 to 9): leaves in lexicographic order, each to the rank with the least
// cost so far.
std::vector<RankShare> balance_by_tree_cost(const PrefixTree& tree, int64_t num_ranks,
                                            const BalanceWeights& weights = {});

// The largest cost of a rank; 0 without ranks. The slowest rank determines the time of a training step.
double largest_cost(const std::vector<RankShare>& shares);

// Returns the largest cost of an interval in Algorithm 4's result, computed from costs alone. whole[i]: cost
// of leaf i's whole path. added[i]: cost of the tokens that leaf i does not share with leaf i - 1. Returns 0
// if there are no leaves.
double largest_balanced_cost(std::span<const double> whole, std::span<const double> added, int64_t num_ranks);

}  // namespace bough
