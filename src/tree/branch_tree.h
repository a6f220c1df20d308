// The branches of a prefix tree: what packing, load balance and schedules work on.
//
// A node is a stretch of tokens between branch points, each but the last with exactly one child; so a tree of
// S sequences has at most 2 S nodes, however many tokens. A leaf stands for every sequence that ends in it
// or, being a prefix, above it: those are there for free wherever a leaf below them is.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tree/prefix_tree.h"

namespace bough {

struct BranchNode {
  int32_t begin, end;  // tree tokens [begin, end)
  int32_t parent;      // index of a node; -1 below the virtual root
  int32_t depth;       // tokens from the root through the node's last one: L(u) of Tree Training, section 2.2
  int32_t num_children = 0;
  bool is_leaf() const { return num_children == 0; }
};

// A step of a depth-first walk from leaf to leaf.
struct LeafVisit {
  int32_t node;
  int32_t length;  // tokens of the leaf's path
  int32_t lcp;     // common prefix with the leaf before; 0 for the first
};

class BranchTree {
 public:
  // O(nodes · log of their length + sequences · log nodes). Children stand in the prefix tree's order.
  explicit BranchTree(const PrefixTree& tree);

  std::vector<BranchNode> nodes;  // in pre-order
  std::vector<int32_t>
      sequence_leaf;  // of each sequence: the first leaf at or below its end; -1 for an empty one

  int32_t size() const { return static_cast<int32_t>(nodes.size()); }
  // Children of node n; n = -1 is the virtual root. May be reordered in place; then `visit` follows that
  // order.
  std::span<int32_t> children(int32_t n);
  std::span<const int32_t> children(int32_t n) const;

  // Children by their first token: leaves in lexicographic order.
  void sort_lexicographically(const PrefixTree& tree);

  // Leaves in depth-first order.
  std::vector<LeafVisit> visit() const;

  // By leaf (node index) the sequences that it stands for, in the batch's order; empty for other nodes.
  std::vector<std::vector<int64_t>> sequences_of_leaves() const;

 private:
  std::vector<int32_t> child_list_,
      child_begin_;  // children of n: [child_begin_[n + 1], child_begin_[n + 2])
};

}  // namespace bough
