// What the strategies share: costs of token ranges, the tree as stretches, and the walk that becomes a plan.
#pragma once

#include <memory>
#include <vector>

#include "tree/branch_tree.h"
#include "tree/plan.h"

namespace bough {

// A tree of (a part of) the batch with running sums over its tokens.
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

  int64_t num_pairs(TokenRange range) const { return before[range.end].pairs - before[range.begin].pairs; }
  int64_t num_rows(TokenRange range) const { return before[range.end].rows - before[range.begin].rows; }
  int64_t num_trained(TokenRange range) const {
    return before[range.end].trained - before[range.begin].trained;
  }
  int64_t num_pieces(
      TokenRange range) const {  // of at least one token; runs, each token the parent of the next
    return 1 + before[range.end].starts - before[range.begin + 1].starts;
  }
  bool trains(int32_t token) const { return before[token + 1].trained > before[token].trained; }
};

// `tree` was built from the request's sequences at these indices, in this order.
// `whole`: the tree of all sequences, where this one is of some: offsets are not summed again for each of many trees.
IndexedTree index_tree(PrefixTree tree, std::vector<int64_t> sequences, const PlanRequest& request,
                       const PrefixTree* whole = nullptr);

std::vector<int64_t> all_sequences(const PlanRequest& request);

// Appends blocks and steps in the order of a walk; keeps the chain of open interior blocks.
class PlanBuilder {
 public:
  PlanBuilder(const IndexedTree& indexed, int64_t max_tokens_per_pass);

  int64_t stack_rows() const { return stack_rows_; }
  size_t num_open() const { return open_.size(); }
  TokenRange open_range(size_t index) const { return planned_.blocks[open_[index]].ranges.front(); }
  int32_t top() const { return open_.empty() ? -1 : open_.back(); }

  // Tokens [begin, end) in even chunks of at most B. With `is_leaf` the last chunk is a leaf block; all others are
  // pushed and stay open.
  void add_run(int32_t begin, int32_t end, bool is_leaf);

  void add_leaf(std::vector<TokenRange> ranges);  // in pre-order

  // Closes open blocks, last first, until `count` are left.
  void close_to(size_t count);
  PlannedTree finish();  // with all closed

 private:
  void push(TokenRange range);
  int32_t add_block(bool interior, std::vector<TokenRange> ranges);

  const IndexedTree& indexed_;
  PlannedTree planned_;
  int64_t limit_;
  std::vector<int32_t> open_;
  int64_t stack_rows_ = 0;
};

}  // namespace bough
