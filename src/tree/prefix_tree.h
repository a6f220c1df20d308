// The prefix tree of a batch of sequences (engine.md 1).
//
// A forest of tokens under a virtual root. Tokens are numbered in depth-first pre-order, children heaviest
// (most tokens below) first, so that any root-to-leaf path is at most log2(T) + 1 runs of consecutive
// numbers. With subtree_end[j] = one past the last token below j:
//
//   key j is visible to query i   iff   j <= i < subtree_end[j]
//
// so one integer a token is the whole attention mask, here and in any subset kept in this order.
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
  std::vector<int32_t> num_sequences;  // sequences that run through the token
  std::vector<int32_t> chain_begin;  // first token of the run of consecutive numbers, each the parent of the
                                     // next, that the token lies in
  // Per sequence of the batch, in its order.
  std::vector<int32_t> sequence_end;     // the sequence's last token; -1 for an empty one
  std::vector<int64_t> sequence_offset;  // [S + 1]: where the sequence starts in the flat batch

  int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }                 // T
  int64_t num_sequences_total() const { return static_cast<int64_t>(sequence_end.size()); }  // S
  int64_t num_flat_tokens() const { return sequence_offset.back(); }                         // N

  // The token of each position of sequence s, in order.
  std::vector<int32_t> path(int64_t sequence) const;

  // Throws InternalError where an invariant of PrefixTree does not hold. O(N).
  void check_integrity(const std::vector<TokenSpan>& sequences) const;
};

// Builds the tree by sorting and longest common prefixes, iteratively; O(N) beside the sort. Equal sequences
// end together; one that is a prefix of another ends inside the tree.
PrefixTree build_prefix_tree(const std::vector<TokenSpan>& sequences);

// UserError for more tokens than a tree can number.
void check_tree_size(int64_t num_tokens);

// A tree that shares nothing: each sequence hangs off the root by itself, in the batch's order.
PrefixTree build_flat_forest(const std::vector<TokenSpan>& sequences);

struct TreeStatistics {
  int64_t num_sequences = 0;
  int64_t num_flat_tokens = 0;         // N
  int64_t num_tree_tokens = 0;         // T
  double compression = 1;              // C = N / T
  double attention_compression = 1;    // visible pairs of the flat batch over those of the tree
  double potential_overlap_ratio = 0;  // POR = 1 - T / N (Tree Training, section 3.1)
  int64_t longest_path = 0;            // tokens
  int64_t num_leaves = 0;
  int64_t num_branch_points = 0;  // tokens with two or more children
  double mean_depth = 0;          // of a tree token
};
TreeStatistics compute_statistics(const PrefixTree& tree);

// FLOPs of the forward pass per token, head row and visible pair. Backward is twice that for each term, so a
// step is kStepOverForward of them, and ratios of steps are ratios of these.
inline constexpr double kStepOverForward = 3;
struct WorkModel {
  double flops_per_token = 1;
  double flops_per_head_row = 0;
  double flops_per_pair = 0;
};
struct StepWork {
  double flat = 0, tree = 0;  // of the flat batch, of what is shared computed once; a WorkModel's units
  double ratio() const { return tree > 0 ? flat / tree : 1; }  // W
};
// trained: one flag a flat token, sequence after sequence; position 0 never counts.
StepWork count_work(const PrefixTree& tree, const std::vector<uint8_t>& trained, const WorkModel& work);

}  // namespace bough
