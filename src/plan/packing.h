// Tree Packing: a batch cut into trees that each fit into one pass (papers/tree-training.txt, sections 2.2
// and 3.1).
//
// A packing partitions the batch's sequences into bins. A bin computes its own prefix tree, at most
// `capacity` tokens; a prefix that sequences of several bins share is computed in each. Fewest tokens
// computed is the goal, and among equals fewest bins. With L(u) the tokens from the root to node u, joining
// two bins whose deepest common node is u saves L(u) tokens.
//
// Every function throws UserError for a capacity below 1 and for a sequence longer than the capacity, naming
// it. Empty sequences lie in the first bin; a batch of nothing else is one bin of no tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tree/branch_tree.h"

namespace bough {

struct PackedBin {
  std::vector<int64_t> sequences;  // the batch's indices, ascending
  int64_t num_tokens = 0;          // computed for them, at most the capacity
};

struct Packing {
  std::vector<PackedBin> bins;
  int64_t num_tokens = 0;  // computed: the sum over bins; the tree's T where nothing is computed twice
};

// What strategy `packed` uses unless told otherwise. Bottom-up: at each branch point, deepest first, the bins
// of its branches are joined by best-fit decreasing; afterwards no two bins fit together. O(S log² S): only
// the bins of all branches but the one with most move, since bins of one branch that did not fit together
// below its end do not above it. 1.0002 of the optimum in the mean over random trees of up to 8 nodes, 1.15
// at worst (packing_test.cpp).
Packing pack(const PrefixTree& tree, int64_t capacity);
Packing pack(const PrefixTree& tree, const BranchTree& branches, int64_t capacity);  // of that tree

// Tree Training's heuristic (section 2.2, end): depth first, deepest leaves first, so that leaves of similar
// depth stand together, and a new traversal whenever the next leaf does not fit. O(S log S).
Packing pack_depth_first(const PrefixTree& tree, int64_t capacity);

// Sequences by length, longest first, each into the first bin it fits into (AReaL:
// areal-tree-training-docs.txt; equal lengths in the batch's order). For comparison: O(S · bins) where bins
// look as if they had room and have not.
Packing pack_first_fit_decreasing(const PrefixTree& tree, int64_t capacity);

// The dynamic program of section 2.2.1: each bin shares one path, from the root to the node chosen for it,
// and repeats the rest of each of its leaves; num_tokens counts it so, L(u) + R(u). Optimal among such
// packings. O(S).
Packing pack_single_path(const PrefixTree& tree, int64_t capacity);

// The exact program of section 2.2.2: per node all sets of bin sizes that no other set dominates; fewest
// tokens, not always fewest bins. Exponential in leaves; nothing where a node needs more than `max_states`
// sets, or too long.
std::optional<Packing> pack_exact(const PrefixTree& tree, int64_t capacity, int64_t max_states = 2000);

// By name, as setting `packer` has it:
//   auto                  pack
//   heuristic             pack_depth_first
//   first_fit_decreasing  pack_first_fit_decreasing
//   single_path           the bins of pack_single_path; what a bin's sequences share beyond the chosen path
//                         is computed once all the same, so that num_tokens may be less than it counts
//   exact                 pack_exact; UserError where the batch is too large for it
// UserError: another name.
Packing pack_by(std::string_view packer, const PrefixTree& tree, const BranchTree& branches,
                int64_t capacity);
// auto, then all of the others.
std::span<const std::string_view> packer_names();
// UserError that names the option and the packers.
void check_packer(const std::string& option, std::string_view name);

// What the algorithms share, of use to no one else.
namespace internal {

// Leaves (node indices) that are computed together.
struct LeafBin {
  std::vector<int32_t> leaves;
  int64_t num_tokens = 0;
};

// UserError for a capacity below 1, or below the longest sequence.
void check_capacity(const PrefixTree& tree, int64_t capacity);

// Bins of leaves to bins of sequences, in the order of their first leaves; checks sizes against the capacity.
Packing to_packing(const BranchTree& branches, std::vector<LeafBin> bins, int64_t capacity);

// The prefix trees of some of the batch's sequences, one after the other, as parts of the whole tree. A
// sequence need not come with the leaf that it is a prefix of.
class TreeOfSome {
 public:
  TreeOfSome(const PrefixTree& tree, const BranchTree& branches);

  // Calls visit(node, begin, end) for stretches of the whole tree's tokens that together are the prefix tree
  // of these sequences, each token once. O(log nodes) a sequence beside the stretches.
  template <class Visit>
  void visit(const std::vector<int64_t>& sequences, const Visit& visit);
  int64_t num_leaves() const { return num_nodes_ - num_inner_nodes_; }  // of the tree that was visited last

 private:
  int32_t node_of(int64_t sequence) const;  // where it ends; -1 for an empty one

  const PrefixTree& tree_;
  const BranchTree& branches_;
  int32_t number_ = 0;               // of the tree that is visited, from 1 on
  std::vector<int32_t> last_tree_;   // by node: the last that has it
  std::vector<int32_t> last_inner_;  // by node: the last that has a child of it
  std::vector<int32_t> reach_;       // by node: how far its last tree has it
  int64_t num_nodes_ = 0, num_inner_nodes_ = 0;
};

template <class Visit>
void TreeOfSome::visit(const std::vector<int64_t>& sequences, const Visit& visit) {
  ++number_;
  num_nodes_ = num_inner_nodes_ = 0;
  for (const int64_t s : sequences) {
    int32_t end = tree_.sequence_end[s] + 1;
    for (int32_t n = node_of(s); n >= 0; n = branches_.nodes[n].parent) {
      const BranchNode& node = branches_.nodes[n];
      const bool is_new = last_tree_[n] != number_;
      const int32_t begin = is_new ? node.begin : reach_[n];
      if (begin < end) {
        visit(node, begin, end);
        reach_[n] = end;
      }
      if (!is_new) break;
      last_tree_[n] = number_;
      ++num_nodes_;
      if (node.parent < 0) break;
      if (last_inner_[node.parent] != number_) ++num_inner_nodes_;
      last_inner_[node.parent] = number_;
      end = branches_.nodes[node.parent].end;
    }
  }
}

}  // namespace internal

}  // namespace bough
