// A tree of (a part of) the batch with its branches and running sums over its tokens: what any range of it costs.
#pragma once

#include <memory>
#include <vector>

#include "tree/branch_tree.h"
#include "plan/plan.h"

namespace bough {

struct IndexedTree {
  std::shared_ptr<const PrefixTree> tree;
  std::vector<int64_t> sequences;  // the batch's index of each of the tree's sequences
  BranchTree branches;
  struct Sums {
    int64_t pairs;    // depth + 1
    int64_t rows;     // sequences that train the token
    int32_t trained;  // tokens that some sequence trains
    int32_t starts;   // tokens that are not the child of the token before them
  };
  std::unique_ptr<Sums[]> before;  // [T + 1]: over tokens below t

  TokenRange all() const { return {0, static_cast<int32_t>(tree->num_tokens())}; }
  int64_t num_pairs(TokenRange range) const { return before[range.end].pairs - before[range.begin].pairs; }
  int64_t num_rows(TokenRange range) const { return before[range.end].rows - before[range.begin].rows; }
  int64_t num_trained(TokenRange range) const {
    return before[range.end].trained - before[range.begin].trained;
  }
};

// `tree` was built from the request's sequences at these indices, in this order.
// `whole`: the tree of all sequences, where this one is of some: offsets are not summed again for each of many trees.
IndexedTree index_tree(PrefixTree tree, std::vector<int64_t> sequences, const PlanRequest& request,
                       const PrefixTree* whole = nullptr);

std::vector<int64_t> all_sequences(const PlanRequest& request);

}  // namespace bough
