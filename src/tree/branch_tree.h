// A prefix tree in which each unbranched run of tokens is one node. Packing, load balancing and schedules use
// it. In contrast to a PrefixTree, it has a few nodes instead of all tokens, and the order of a node's
// children may be changed. Token numbers are those of the PrefixTree.
//
// - A node is a run of tokens in which each token except the last has exactly one child.
// - A tree of S sequences has at most 2 S nodes, for any number of tokens.
// - Each sequence is represented by one leaf: the first leaf at or below the sequence's end. A sequence that
//   ends above its leaf is a prefix of the leaf's path, so it needs no tokens of its own.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tree/prefix_tree.h"

namespace bough {

struct BranchNode {
  int32_t begin, end;  // tree tokens [begin, end)
  int32_t parent;      // index of a node; -1 if the parent is the virtual root
  int32_t depth;       // tokens from the root through the node's last one: L(u) of Tree Training, section 2.2
  int32_t num_children = 0;
  bool is_leaf() const { return num_children == 0; }
};

// One leaf in a depth-first traversal of the leaves.
struct LeafVisit {
  int32_t node;
  int32_t length;  // tokens of the leaf's path
  int32_t lcp;     // tokens in common with the path of the previous leaf; 0 for the first leaf
};

class BranchTree {
 public:
  // Takes O(nodes · log(tokens of a node) + tokens / 16 + sequences). Children are in the prefix tree's
  // order.
  explicit BranchTree(const PrefixTree& tree);  // must outlive this object and its copies
  explicit BranchTree(PrefixTree&&) = delete;

  const PrefixTree& tree() const { return *tree_; }

  std::vector<BranchNode> nodes;  // in pre-order
  std::vector<int32_t>
      sequence_leaf;  // per sequence: node index of the first leaf at or below its end; -1 if it is empty

  int32_t size() const { return static_cast<int32_t>(nodes.size()); }
  // Children of node n; n = -1 is the virtual root. Callers may reorder the children in place. `visit`
  // follows the new order.
  std::span<int32_t> children(int32_t n);
  std::span<const int32_t> children(int32_t n) const;

  // Sorts all children by their first token. `visit` then returns leaves in lexicographic order.
  void sort_lexicographically();

  // Leaves in depth-first order.
  std::vector<LeafVisit> visit() const;

  // Entry n lists the sequences that leaf n represents (sequence_leaf), in batch order. Empty if node n is
  // not a leaf.
  std::vector<std::vector<int64_t>> sequences_of_leaves() const;

 private:
  const PrefixTree* tree_;
  std::vector<int32_t> child_list_,
      child_begin_;  // children of n: [child_begin_[n + 1], child_begin_[n + 2])
};

}  // namespace bough
