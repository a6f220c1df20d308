// Which blocks of its context a sampled token attends to: the settings of block top-k attention (papers:
// DistillSparse, section 4; Quest) and the geometry of blocks.
//
// A block is `block_tokens` consecutive tokens of a sequence: 4, 8, 16, 32 or 64. Block i has the positions
// from i · block_tokens on. The cache keeps keys in pages of 16 tokens (kernels/paged_attention), so a block
// is a part of a page or several whole pages.
//
// The first `first_blocks` and the last `last_blocks` blocks of a context are always kept. They count against
// the budget. The last block has the query's own token. A query with no more blocks than its budget keeps all
// blocks.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "kernels/paged_attention/paged_plan.h"

namespace bough {

// kExact: the query keeps single keys by their own scores instead of blocks (top_keys.h), so blocks have no
// summaries.
enum class BlockSummary { kMean, kMinMax, kExact };
BlockSummary block_summary(const std::string& name);  // mean, minmax, exact; else throws InternalError

struct SparsePolicy {
  int64_t budget_blocks = 0;  // blocks that a sampled token attends to; 0: all
  BlockSummary summary = BlockSummary::kMean;
  int64_t dense_layers = 0;  // the first dense_layers layers attend to all blocks
  // Maps a number of context tokens, the query's own included, to the budget in blocks from this number on.
  // Budgets must not decrease.
  std::map<int64_t, int64_t> larger_budgets = {};
  bool keeps_choices = false;  // generation records the chosen blocks for training
  int64_t block_tokens = kPageTokens;
  int64_t first_blocks = 1, last_blocks = 2;  // always kept; last_blocks is at least 1

  bool is_sparse() const { return budget_blocks > 0; }
  bool has_summaries() const { return is_sparse() && summary != BlockSummary::kExact; }
  // Whether blocks are cache pages, of which the first and the last two are always kept.
  bool is_by_pages() const { return block_tokens == kPageTokens && first_blocks == 1 && last_blocks == 2; }
  int64_t blocks_for(int64_t num_tokens) const { return (num_tokens + block_tokens - 1) / block_tokens; }
  // Blocks that a query attends to if its context, its own token included, has this many tokens.
  int64_t budget_of(int64_t context_tokens) const;
  int64_t largest_budget() const {
    return larger_budgets.empty() ? budget_blocks : larger_budgets.rbegin()->second;
  }
  // How many blocks of a budget are chosen by score.
  int64_t chosen_of(int64_t budget) const { return budget - first_blocks - last_blocks; }
  int64_t least_budget() const { return first_blocks + last_blocks + 1; }

  // A part is a block's tokens in one page. Parts are numbered by page: part p lies in page p /
  // parts_per_page.
  int64_t part_tokens() const { return block_tokens < kPageTokens ? block_tokens : kPageTokens; }
  int64_t parts_per_page() const { return kPageTokens / part_tokens(); }
  int64_t parts_per_block() const { return block_tokens / part_tokens(); }
  // The part that has the token at `position` of a sequence with these pages.
  int32_t part_at(std::span<const int32_t> pages, int64_t position) const {
    return static_cast<int32_t>(pages[static_cast<size_t>(position / kPageTokens)] * parts_per_page() +
                                position % kPageTokens / part_tokens());
  }
  // The last part of a block. The summary of the block is stored under its number.
  int32_t last_part(std::span<const int32_t> pages, int64_t block) const {
    return part_at(pages, (block + 1) * block_tokens - 1);
  }
};

// Returns the parts of blocks, block by block (parts_per_block() each), whose last tokens are among the
// segments' tokens.
std::vector<int32_t> completed_blocks(std::span<const PagedSegment> segments, const SparsePolicy& policy);
// The same for all complete blocks of the segments' sequences, each block once. Sequences with a page in
// common must be equal up to the end of this page.
std::vector<int32_t> complete_blocks(std::span<const PagedSegment> segments, const SparsePolicy& policy);

// The pages that have a block of a list, and which of their keys the blocks have.
struct PagesOfBlocks {
  std::vector<int32_t> pages;   // ascending indices of pages in the sequence
  std::vector<uint16_t> masks;  // by page: bit j is set if a block has key j; empty if blocks are whole pages

  // blocks: ascending. num_pages: pages of the context; a block may end after the last of them.
  void set(std::span<const int32_t> blocks, int64_t num_pages, const SparsePolicy& policy);
};

}  // namespace bough
