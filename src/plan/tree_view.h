// What is planned as one tree, without building it: the tree of the whole batch, some of its roots, or one node of it
// with the path down to it. Strategies and their outlines read tokens through it alone.
//
// Tokens of a node with its path are numbered as in a tree of their own: the path from 0 on, then the node's subtree.
// Those of some roots keep the numbers of the whole tree.
#pragma once

#include <utility>

#include "plan/indexed_tree.h"

namespace bough {

class TreeView {
 public:
  using Sums = IndexedTree::Sums;

  TreeView(const IndexedTree& whole)  // NOLINT: a tree is a view of itself
      : TreeView(whole, whole.branches.children(-1)) {}
  TreeView(const IndexedTree& whole, std::span<const int32_t> roots) : whole_(&whole), roots_(roots) {}

  // node: its subtree hangs off a path of `path.size()` - 2 tokens that is the view's own. path: sums before each of the
  // path's tokens and the node's first, and after that one.
  TreeView(const IndexedTree& whole, int32_t node, std::vector<Sums> path)
      : whole_(&whole), node_(node), path_(std::move(path)) {
    const int32_t begin = whole.branches.nodes[node].begin;
    num_path_ = static_cast<int32_t>(path_.size()) - 2;
    shift_ = num_path_ - begin;
    const auto &own = path_.back(), &there = whole.before[begin + 1];
    base_ = {own.pairs - there.pairs, own.rows - there.rows, own.trained - there.trained,
             own.starts - there.starts};
    end_ = whole.tree->subtree_end[begin] + shift_;
  }

  std::span<const int32_t> roots() const { return node_ < 0 ? roots_ : std::span(&node_, 1); }
  std::span<const int32_t> children(int32_t node) const { return whole_->branches.children(node); }
  // The stretch of tokens of a node; the path belongs to the node below it.
  TokenRange stretch(int32_t node) const {
    const auto& n = whole_->branches.nodes[node];
    return {node == node_ ? 0 : n.begin + shift_, n.end + shift_};
  }
  TokenRange subtree(int32_t node) const {
    const int32_t begin = whole_->branches.nodes[node].begin;
    return {node == node_ ? 0 : begin + shift_, whole_->tree->subtree_end[begin] + shift_};
  }

  int32_t depth(int32_t token) const {
    return token <= num_path_ && node_ >= 0 ? token : whole_->tree->depth[token - shift_];
  }
  int32_t subtree_end(int32_t token) const {
    return token < num_path_ ? end_ : whole_->tree->subtree_end[token - shift_] + shift_;
  }
  int64_t num_pairs(TokenRange range) const { return sum(&Sums::pairs, range.begin, range.end); }
  int64_t num_rows(TokenRange range) const { return sum(&Sums::rows, range.begin, range.end); }
  int64_t num_trained(TokenRange range) const { return sum(&Sums::trained, range.begin, range.end); }
  // Of at least one token; runs, each token the parent of the next.
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
    return int64_t{whole_->before[token - shift_].*field} + base_.*field;
  }

  const IndexedTree* whole_;
  std::span<const int32_t> roots_;
  int32_t node_ = -1;
  std::vector<Sums> path_;
  int32_t num_path_ = 0, shift_ = 0, end_ = 0;
  Sums base_{0, 0, 0, 0};
};

}  // namespace bough
