// Tree Packing: splits a batch into trees that each fit into one pass (Tree Training, arXiv 2511.00413,
// sections 2.2 and 3.1).
//
// A packing partitions the batch's sequences into bins. Each bin computes the prefix tree of its sequences,
// which has at most `capacity` tokens. A prefix common to sequences of several bins is computed in each of
// these bins. The goal is the fewest computed tokens, then the fewest bins. Let L(u) be the number of tokens
// from the root through node u. Joining two bins whose deepest common node is u saves L(u) tokens.
//
// Every function throws UserError if the capacity is below 1 or a sequence is longer than the capacity. The
// message names the sequence. Empty sequences go to the first bin. A batch of only empty sequences gives one
// bin without tokens.
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
  int64_t num_tokens = 0;          // tokens of the sequences' prefix tree, at most the capacity
};

struct Packing {
  std::vector<PackedBin> bins;
  int64_t num_tokens = 0;  // sum over bins; equals the tree's T if no token is computed twice
};

// The default of strategy `packed`. Works bottom-up: at each branch point, deepest first, the bins of its
// branches are joined by best-fit decreasing. In the result, no two bins fit into one.
// O(S log² S): at a branch point, only the bins of the other branches are moved, not those of the branch with
// the most bins. Two bins that did not fit together below the branch point do not fit together above it,
// because joining them there saves fewer tokens.
// On random trees of up to 8 nodes, the bins have in the mean 1.0002 times the fewest possible tokens, at
// worst 1.15 times (packing_test.cpp).
Packing pack(const PrefixTree& tree, int64_t capacity);
Packing pack(const BranchTree& branches, int64_t capacity);

// Tree Training's heuristic (end of section 2.2): a depth-first traversal that visits children with deeper
// leaves first, so that leaves of similar depth are neighbors. A new bin begins if the next leaf does not
// fit. O(S log S).
Packing pack_depth_first(const PrefixTree& tree, int64_t capacity);

// AReaL's method, for comparison: sequences by length, longest first, each into the first bin that has room
// for it. Sequences of equal length stay in batch order. O(S · bins) at worst.
Packing pack_first_fit_decreasing(const PrefixTree& tree, int64_t capacity);

// The dynamic program of section 2.2.1. The sequences of a bin share only one path, from the root to a node u
// that the program chooses. The rest of each leaf's path is counted per leaf, R(u) tokens in total.
// num_tokens is the sum of L(u) + R(u). Optimal among such packings. O(S).
Packing pack_single_path(const PrefixTree& tree, int64_t capacity);

// The exact program of section 2.2.2. For each node it keeps all sets of bin sizes that no other set
// dominates. Gives the fewest tokens, but not always the fewest bins. Exponential in the number of leaves.
// Returns nullopt if a node needs more than `max_states` sets, or if the search needs too many steps.
std::optional<Packing> pack_exact(const PrefixTree& tree, int64_t capacity, int64_t max_states = 2000);

// Packs by the name in the setting `packer`:
//   auto                  pack
//   heuristic             pack_depth_first
//   first_fit_decreasing  pack_first_fit_decreasing
//   single_path           the bins of pack_single_path. num_tokens may be smaller, because prefixes shared
//                         beyond the chosen path are also computed once.
//   exact                 pack_exact; throws UserError if the batch is too large for it
// Throws UserError if the name is unknown.
Packing pack_by(std::string_view packer, const BranchTree& branches, int64_t capacity);
// All names, `auto` first.
std::span<const std::string_view> packer_names();
// Throws UserError if there is no packer of this name. The message names the option and the packers.
void check_packer(const std::string& option, std::string_view name);

// Shared by the packers and by strategy `packed`.
namespace internal {

// Leaves (node indices) that are computed together.
struct LeafBin {
  std::vector<int32_t> leaves;
  int64_t num_tokens = 0;
};

// Throws UserError if the capacity is below 1 or below the longest sequence.
void check_capacity(const PrefixTree& tree, int64_t capacity);

// Converts bins of leaves to bins of sequences, in the order of their first leaves. Throws InternalError if a
// bin exceeds the capacity.
Packing to_packing(const BranchTree& branches, std::vector<LeafBin> bins, int64_t capacity);

// Visits the prefix tree of a subset of the batch's sequences, for one subset after the other, without
// building that tree. A subset may contain a sequence that ends above a leaf without containing the leaf.
class TreeOfSome {
 public:
  explicit TreeOfSome(const BranchTree& branches);

  // Calls visit(node, begin, end) for token ranges [begin, end) of the whole tree. Together these ranges are
  // the prefix tree of `sequences`, each token once. O(ranges + sequences · log nodes).
  template <class Visit>
  void visit(const std::vector<int64_t>& sequences, const Visit& visit);
  int64_t num_leaves() const { return num_nodes_ - num_inner_nodes_; }  // of the last visited tree

 private:
  int32_t node_of(int64_t sequence) const;  // the node in which the sequence ends; -1 if it is empty

  const BranchTree& branches_;
  int32_t number_ = 0;               // number of the subset that is visited, from 1
  std::vector<int32_t> last_tree_;   // by node: number of the last subset whose tree has the node
  std::vector<int32_t> last_inner_;  // by node: number of the last subset whose tree has a child of the node
  std::vector<int32_t> reach_;       // by node: one past its last token in the tree of that subset
  int64_t num_nodes_ = 0, num_inner_nodes_ = 0;
};

template <class Visit>
void TreeOfSome::visit(const std::vector<int64_t>& sequences, const Visit& visit) {
  ++number_;
  num_nodes_ = num_inner_nodes_ = 0;
  for (const int64_t s : sequences) {
    int32_t end = branches_.tree().sequence_end[s] + 1;
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
