// Which rows of the head and of the loss belong to which block of a planned tree.
#pragma once

#include <vector>

#include "train/batch.h"
#include "plan/plan.h"

namespace bough {

// The head rows of one block: its tokens that some sequence trains, in pre-order. A row's hidden state is that of
// the token's parent: row `source` of the block's own hidden states followed by those listed in `outside`.
struct BlockRows {
  struct Outside {
    int32_t block;  // an interior block below
    int32_t exit;   // index into its exits
  };
  std::vector<int64_t> labels;   // token ids
  std::vector<int64_t> sources;  // < num_tokens: own; else num_tokens + index into `outside`
  std::vector<Outside> outside;
  std::vector<int64_t> loss_begin;  // [rows + 1]: the loss rows of row r are loss_rows[loss_begin[r] ..]
  std::vector<int64_t> loss_rows;   // of the batch
  int64_t num_rows() const { return static_cast<int64_t>(labels.size()); }
};

struct RowMap {
  std::vector<BlockRows> blocks;
  // Of each interior block: its tokens (as local rows) whose hidden states other blocks' heads read.
  std::vector<std::vector<int64_t>> exits;
  // Whether the block, or anything that runs on top of it, trains a token. A block that does not is never run.
  std::vector<bool> needed;
};

RowMap make_row_map(const PlannedTree& planned, const TrainBatch& batch);

}  // namespace bough
