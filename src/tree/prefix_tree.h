// The prefix tree of a batch of sequences (engine.md 1).
//
// A forest of tokens under a virtual root, which is not a token. Tokens are numbered in depth-first
// pre-order. The child with the most tokens below it comes first. So any root-to-leaf path has at most
// log2(T) + 1 runs of consecutive numbers. subtree_end[j] is one past the last token below j. The attention
// mask follows from it:
//
//   key j is visible to query i   iff   j <= i < subtree_end[j]
//
// One integer per token is the whole mask, also of a subset of the tokens that is kept in this order.
//
// PrefixTree has one node per token; plans hold it and passes are made from it. BranchTree (branch_tree.h)
// has one node per run of tokens without a branch point.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace bough {

using TokenSpan = std::span<const int32_t>;

struct PrefixTree {
  // Per token, in pre-order; T = num_tokens().
  std::vector<int32_t> tokens;  // token ids
  std::vector<int32_t> parent;  // -1 below the virtual root
  std::vector<int32_t> depth;   // = position id; 0 below the virtual root
  std::vector<int32_t> subtree_end;
  std::vector<int32_t> num_sequences;  // sequences that contain the token
  std::vector<int32_t> chain_begin;    // first token of the token's chain. In a chain, token numbers are
                                       // consecutive and each token is the parent of the next
  // One entry per sequence, in batch order.
  std::vector<int32_t> sequence_end;     // the sequence's last token; -1 for an empty one
  std::vector<int64_t> sequence_offset;  // [S + 1]: start of the sequence in the flat batch

  int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }                 // T
  int64_t num_sequences_total() const { return static_cast<int64_t>(sequence_end.size()); }  // S
  int64_t num_flat_tokens() const { return sequence_offset.back(); }                         // N

  // The tree token at each position of a sequence, root first.
  std::vector<int32_t> path(int64_t sequence) const;

  // Throws InternalError if an invariant of PrefixTree does not hold. `sequences`: those of the tree. O(N).
  void check_integrity(const std::vector<TokenSpan>& sequences) const;
};

// Builds the tree of sequences in any order: sorts them and finds the longest common prefixes. O(N) without
// the sort. Equal sequences end at the same token. A sequence that is a prefix of another ends inside the
// tree. Throws UserError like check_tree_size.
PrefixTree build_prefix_tree(const std::vector<TokenSpan>& sequences);

// Throws UserError if num_tokens exceeds INT32_MAX, the most tokens that a tree can number.
void check_tree_size(int64_t num_tokens);

// A tree without common prefixes: each sequence is a path of its own below the virtual root, in batch order.
PrefixTree build_flat_forest(const std::vector<TokenSpan>& sequences);

struct TreeStatistics {
  int64_t num_sequences = 0;
  int64_t num_flat_tokens = 0;         // N
  int64_t num_tree_tokens = 0;         // T
  double compression = 1;              // C = N / T
  double attention_compression = 1;    // visible (query, key) pairs: flat batch divided by tree
  double potential_overlap_ratio = 0;  // POR = 1 - T / N (Tree Training, section 3.1)
  int64_t longest_path = 0;            // tokens
  int64_t num_leaves = 0;
  int64_t num_branch_points = 0;  // tokens with two or more children
  double mean_depth = 0;          // of a tree token
};
TreeStatistics compute_statistics(const PrefixTree& tree);

// FLOPs of the forward pass per token, per head row (a trained token of the tree or of the flat batch) and
// per visible (query, key) pair. Backward costs twice as many. So forward and backward together cost
// kStepOverForward times the forward pass.
inline constexpr double kStepOverForward = 3;
struct WorkModel {
  double flops_per_token = 1;
  double flops_per_head_row = 0;
  double flops_per_pair = 0;
};
struct StepWork {
  double flat = 0, tree = 0;  // FLOPs for the flat batch and for the tree, in the units of the WorkModel
  double ratio() const { return tree > 0 ? flat / tree : 1; }  // W
};
// trained: one flag per flat token, sequence after sequence. The flag of a sequence's first token is ignored,
// because no token predicts it.
StepWork count_work(const PrefixTree& tree, const std::vector<uint8_t>& trained, const WorkModel& work);

}  // namespace bough
