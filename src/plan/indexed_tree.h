// The planner's view of the batch: the prefix tree with its branches and with prefix sums over tokens. From
// the sums follows the cost of any token range in O(1). In contrast to PrefixTree and BranchTree, which know
// sequences only, an IndexedTree knows the PlanRequest and therefore which tokens train.
//
// A part of the tree can be planned as a separate tree (TreePart, TreeView). The PrefixTree of a part is only
// built if the plan is chosen.
//
// A "node" is a node of the BranchTree: a run of tokens without a branch point.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "plan/plan.h"
#include "tree/branch_tree.h"

namespace bough {

struct TreePart {
  std::vector<int32_t>
      path;  // nodes from a root down that the part computes again; empty: the part consists of roots
  std::vector<int32_t> nodes;  // children of the path's last node, in tree order; the part has their subtrees
  std::vector<int32_t> ends;   // nodes of the path; the sequences that end in them belong to the part
};

class IndexedTree {
 public:
  struct Sums {
    int64_t pairs;    // (query, key) pairs: depth + 1 per token
    int64_t rows;     // loss rows: the sum over tokens of the sequences that train the token
    int32_t trained;  // tokens that at least one sequence trains
    int32_t starts;   // tokens whose parent is not the token numbered directly before
  };

  // Builds the tree of all sequences of the request. The request must outlive this object.
  explicit IndexedTree(const PlanRequest& request);

  const PlanRequest& request() const { return request_; }
  const std::shared_ptr<const PrefixTree>& shared_tree() const { return tree_; }
  const PrefixTree& tree() const { return *tree_; }
  const BranchTree& branches() const { return branches_; }
  const Sums& before(int64_t token) const { return before_[token]; }  // sums over [0, token)

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

  // Returns the batch indices of the part's sequences. The first call sorts all sequences.
  std::vector<int64_t> sequences_of(const TreePart& part);
  // Returns the sums before each token of the part's path, and after the last one. Counts only the sequences
  // of the part. `starts` is 0 in the first entry and 1 in all others.
  std::vector<Sums> path_sums(const TreePart& part);
  // Returns one leaf block with all tokens of the part, its path included, however many they are. The part
  // must have a path.
  Block leaf_block(const TreePart& part);
  // Changes the token numbers in `planned` from this tree's to those of a tree of only these roots.
  void renumber(const TreePart& roots, PlannedTree& planned) const;

 private:
  std::vector<int32_t> trained_counts() const;
  void append_sequences(TokenRange range, std::vector<int64_t>& to);  // those that end in the range
  const std::vector<int64_t>& by_end();

  const PlanRequest& request_;
  std::shared_ptr<const PrefixTree> tree_;
  BranchTree branches_;
  std::unique_ptr<Sums[]> before_;  // [T + 1]
  std::vector<int64_t> by_end_;     // sequences by the token they end at; filled on first use
};

// The tokens that are planned as one tree: the whole tree, some of its roots with their subtrees, or one node
// with its subtree and the path down to the node. In contrast to IndexedTree, a TreeView owns no tree and may
// number the tokens of a part from 0. PlanBuilder reads tokens only through a TreeView.
//
// Token numbers:
//   - View of a node with a path: the path is numbered from 0, then the node's subtree.
//   - View of roots: the numbers of the whole tree.
class TreeView {
 public:
  using Sums = IndexedTree::Sums;

  TreeView(const IndexedTree& whole)  // NOLINT: a tree is a view of itself
      : TreeView(whole, whole.branches().children(-1)) {}
  TreeView(const IndexedTree& whole, std::span<const int32_t> roots) : whole_(&whole), roots_(roots) {}
  // View of a part with a path. The part must have exactly one entry in `nodes`; that node's subtree belongs
  // to the view. `whole` is not const because path_sums() may sort its sequences.
  TreeView(IndexedTree& whole, const TreePart& part);

  std::span<const int32_t> roots() const { return node_ < 0 ? roots_ : std::span(&node_, 1); }
  std::span<const int32_t> children(int32_t node) const { return whole_->branches().children(node); }
  // Tokens of a node. If the view has a path, the tokens of its node begin with the path.
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
  // Number of runs in the range, which must not be empty. In a run, each token is the parent of the next one.
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
  int32_t node_ = -1;       // the node below the path; -1: a view of roots
  std::vector<Sums> path_;  // sums before each token of the path, before the node's first token, and after it
  // shift_: a token's number in the view minus its number in the whole tree. end_: end of the node's subtree
  // in the view. base_: added to the whole tree's sums for tokens after the path.
  int32_t num_path_ = 0, shift_ = 0, end_ = 0;
  Sums base_{0, 0, 0, 0};
};

}  // namespace bough
