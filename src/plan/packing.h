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

// What strategy `packed` uses. Bottom-up: at each branch point, deepest first, the bins of its branches are
// joined by best-fit decreasing; afterwards no two bins fit together. O(S log² S): only the bins of all
// branches but the one with most move, since bins of one branch that did not fit together below its end do
// not above it. 1.0002 of the optimum in the mean over random trees of up to 8 nodes, 1.15 at worst
// (packing_test.cpp).
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

// ERR: the part of the batch's tokens that is not computed (section 3.1); at most POR, which is that of one
// bin of unlimited capacity (TreeStatistics::potential_overlap_ratio). 1 / (1 - ERR) is the effective
// compression that DTA (section 5.3) gives for split trees. 0 for no tokens.
double effective_reuse_ratio(const Packing& packing, const PrefixTree& tree);

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

}  // namespace internal

}  // namespace bough
