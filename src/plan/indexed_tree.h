// The batch as planning reads it: its prefix tree with branches and running sums over tokens, what any range
// of it costs; and parts of it that are planned as trees of their own, by what they take of the whole: no
// tree is built for one until its plan is chosen.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "plan/plan.h"
#include "tree/branch_tree.h"

namespace bough {

struct TreePart {
  std::vector<int32_t>
      path;  // nodes from a root down that the part repeats; none: roots, and empty sequences
  std::vector<int32_t> nodes;  // children of the path's last, in the tree's order, with all below them
  std::vector<int32_t> ends;   // nodes of the path: sequences that end there are the part's
};

class IndexedTree {
 public:
  struct Sums {
    int64_t pairs;    // depth + 1
    int64_t rows;     // sequences that train the token
    int32_t trained;  // tokens that some sequence trains
    int32_t starts;   // tokens that are not the child of the token before them
  };

  // Indexes the tree of all the request's sequences; the request must outlive it.
  explicit IndexedTree(const PlanRequest& request);

  const PlanRequest& request() const { return request_; }
  const std::shared_ptr<const PrefixTree>& shared_tree() const { return tree_; }
  const PrefixTree& tree() const { return *tree_; }
  const BranchTree& branches() const { return branches_; }
  const Sums& before(int64_t token) const { return before_[token]; }  // over tokens below it; to T

  std::vector<int64_t> all_sequences() const;
  TokenRange all() const { return {0, static_cast<int32_t>(tree_->num_tokens())}; }
  TokenRange subtree(int32_t node) const {
    const int32_t begin = branches_.nodes[node].begin;
    return {begin, tree_->subtree_end[begin]};
  }
  int64_t num_pairs(TokenRange range) const { return before(range.end).pairs - before(range.begin).pairs; }
  int64_t num_rows(TokenRange range) const { return before(range.end).rows - before(range.begin).rows; }
  int64_t num_trained(TokenRange range) const {
    return before(range.end).trained - before(range.begin).trained;
  }

  // Indices of the request's sequences that are the part's, as TreePart names them. Sorts them all the first
  // time.
  std::vector<int64_t> sequences_of(const TreePart& part);
  // Sums before each token of the part's path, and after the last. Beside `starts`, as if the path were all.
  std::vector<Sums> path_sums(const TreePart& part);
  // The leaf block that a part with a path is where it fits into a pass.
  Block leaf_block(const TreePart& part);
  // Changes this tree's numbers to those of a tree of these roots alone.
  void renumber(const TreePart& roots, PlannedTree& planned) const;

 private:
  std::vector<int32_t> trained_counts() const;
  void append_sequences(TokenRange range, std::vector<int64_t>& to);  // that end in the range
  const std::vector<int64_t>& by_end();

  const PlanRequest& request_;
  std::shared_ptr<const PrefixTree> tree_;
  BranchTree branches_;
  std::unique_ptr<Sums[]> before_;  // [T + 1]
  std::vector<int64_t> by_end_;     // sequences by the token they end at; once they are asked for
};

// What is planned as one tree, without building it: the tree of the whole batch, some of its roots, or one
// node of it with the path down to it. PlanBuilder reads tokens through it alone.
//
// Tokens of a node with its path are numbered as in a tree of their own: the path from 0 on, then the node's
// subtree. Those of some roots keep the numbers of the whole tree.
class TreeView {
 public:
  using Sums = IndexedTree::Sums;

  TreeView(const IndexedTree& whole)  // NOLINT: a tree is a view of itself
      : TreeView(whole, whole.branches().children(-1)) {}
  TreeView(const IndexedTree& whole, std::span<const int32_t> roots) : whole_(&whole), roots_(roots) {}
  // The view of a part of one node below a path.
  TreeView(IndexedTree& whole, const TreePart& part);

  std::span<const int32_t> roots() const { return node_ < 0 ? roots_ : std::span(&node_, 1); }
  std::span<const int32_t> children(int32_t node) const { return whole_->branches().children(node); }
  // The stretch of tokens of a node; the path belongs to the node below it.
  TokenRange stretch(int32_t node) const {
    const auto& n = whole_->branches().nodes[node];
    return {node == node_ ? 0 : n.begin + shift_, n.end + shift_};
  }
  TokenRange subtree(int32_t node) const {
    const auto range = whole_->subtree(node);
    return {node == node_ ? 0 : range.begin + shift_, range.end + shift_};
  }

  int32_t depth(int32_t token) const {
    return token <= num_path_ && node_ >= 0 ? token : whole_->tree().depth[token - shift_];
  }
  int32_t subtree_end(int32_t token) const {
    return token < num_path_ ? end_ : whole_->tree().subtree_end[token - shift_] + shift_;
  }
  int64_t num_pairs(TokenRange range) const { return sum(&Sums::pairs, range.begin, range.end); }
  int64_t num_rows(TokenRange range) const { return sum(&Sums::rows, range.begin, range.end); }
  int64_t num_trained(TokenRange range) const { return sum(&Sums::trained, range.begin, range.end); }
  // The number of runs, each token the parent of the next, in a range of at least one token.
  int64_t num_pieces(TokenRange range) const { return 1 + sum(&Sums::starts, range.begin + 1, range.end); }
  bool trains(int32_t token) const { return num_trained({token, token + 1}) > 0; }

 private:
  template <class Number>
  int64_t sum(Number Sums::*field, int32_t begin, int32_t end) const {
    return int64_t{before(field, end)} - before(field, begin);
  }
  template <class Number>
  int64_t before(Number Sums::*field, int32_t token) const {
    if (token < static_cast<int32_t>(path_.size())) return path_[token].*field;
    return int64_t{whole_->before(token - shift_).*field} + base_.*field;
  }

  const IndexedTree* whole_;
  std::span<const int32_t> roots_;
  int32_t node_ = -1;       // whose subtree hangs off a path of num_path_ tokens that is the view's own
  std::vector<Sums> path_;  // sums before each of the path's tokens and the node's first, and after that one
  int32_t num_path_ = 0, shift_ = 0, end_ = 0;
  Sums base_{0, 0, 0, 0};
};

}  // namespace bough
