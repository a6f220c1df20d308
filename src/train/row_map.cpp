#include "train/row_map.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace bough {

namespace {
// Loss rows of each tree token, as a compressed list.
struct TokenRows {
  std::vector<int64_t> begin;  // [T + 1]
  std::vector<int64_t> rows;
};

TokenRows rows_by_token(const PlannedTree& planned, const TrainBatch& batch) {
  const auto& tree = *planned.tree;
  TokenRows result{std::vector<int64_t>(tree.num_tokens() + 1, 0), {}};
  const auto for_each = [&](const auto& visit) {
    for (size_t i = 0; i < planned.sequences.size(); ++i) {
      const int64_t s = planned.sequences[i];
      if (batch.trained_positions[s].empty()) continue;
      const auto path = tree.path(static_cast<int64_t>(i));
      int64_t row = batch.row_offset[s];
      for (const int32_t position : batch.trained_positions[s]) visit(path[position], row++);
    }
  };
  for_each([&](int32_t token, int64_t) { ++result.begin[token + 1]; });
  std::partial_sum(result.begin.begin(), result.begin.end(), result.begin.begin());
  result.rows.resize(result.begin.back());
  auto next = result.begin;
  for_each([&](int32_t token, int64_t row) { result.rows[next[token]++] = row; });
  return result;
}
}  // namespace

RowMap make_row_map(const PlannedTree& planned, const TrainBatch& batch) {
  const auto& tree = *planned.tree;
  const auto by_token = rows_by_token(planned, batch);
  const auto has_rows = [&](int32_t t) { return by_token.begin[t + 1] > by_token.begin[t]; };
  const size_t num_blocks = planned.blocks.size();
  std::vector<int32_t> block_of(tree.num_tokens()), local(tree.num_tokens());
  RowMap map{std::vector<BlockRows>(num_blocks), std::vector<std::vector<int64_t>>(num_blocks),
             std::vector<bool>(num_blocks)};
  for (size_t b = 0; b < num_blocks; ++b) {
    int32_t index = 0;
    for (const auto& range : planned.blocks[b].ranges) {
      for (int32_t t = range.begin; t < range.end; ++t) {
        block_of[t] = static_cast<int32_t>(b);
        local[t] = index++;
      }
      // Rows of the subtree of the range's first token: all that a run of one path can send a gradient to.
      if (by_token.begin[tree.subtree_end[range.begin]] > by_token.begin[range.begin]) map.needed[b] = true;
    }
    if (!planned.blocks[b].interior)  // a forest's later roots lie outside the first one's subtree
      for (const auto& range : planned.blocks[b].ranges)
        if (by_token.begin[range.end] > by_token.begin[range.begin]) map.needed[b] = true;
  }
  // What runs on top of a block needs its rows on the stack.
  for (size_t b = num_blocks; b-- > 0;)
    if (map.needed[b] && planned.blocks[b].above >= 0) map.needed[planned.blocks[b].above] = true;
  std::vector<int32_t> exit_of(tree.num_tokens(), -1);
  for (int32_t t = 0; t < tree.num_tokens(); ++t) {
    const int32_t p = tree.parent[t];
    if (p < 0 || !has_rows(t) || block_of[p] == block_of[t] || exit_of[p] >= 0) continue;
    auto& exits = map.exits[block_of[p]];
    exit_of[p] = static_cast<int32_t>(exits.size());
    exits.push_back(local[p]);
  }
  for (size_t b = 0; b < num_blocks; ++b) {
    auto& rows = map.blocks[b];
    rows.loss_begin.push_back(0);
    int32_t last_outside = -1;  // siblings share their parent's row
    for (const auto& range : planned.blocks[b].ranges)
      for (int32_t t = range.begin; t < range.end; ++t) {
        if (!has_rows(t)) continue;
        const int32_t p = tree.parent[t];
        BOUGH_CHECK(p >= 0, "token ", t, " has no parent, yet a loss row");
        if (block_of[p] == static_cast<int32_t>(b)) {
          rows.sources.push_back(local[p]);
        } else {
          if (last_outside != p) rows.outside.push_back({block_of[p], exit_of[p]});
          last_outside = p;
          rows.sources.push_back(planned.blocks[b].num_tokens + static_cast<int64_t>(rows.outside.size()) -
                                 1);
        }
        rows.labels.push_back(tree.tokens[t]);
        rows.loss_rows.insert(rows.loss_rows.end(), by_token.rows.begin() + by_token.begin[t],
                              by_token.rows.begin() + by_token.begin[t + 1]);
        rows.loss_begin.push_back(static_cast<int64_t>(rows.loss_rows.size()));
      }
  }
  return map;
}

}  // namespace bough
