#include "train/pass_input.h"

#include <algorithm>

#include "base/error.h"

namespace bough {

namespace {

// end_local[j]: the number of tokens of the pass that are numbered below the end of key j's subtree. numbers:
// the tree tokens of the pass.
std::vector<int32_t> local_ends(const PassSource& source, const std::vector<int64_t>& numbers) {
  const Block& block = source.block;
  const std::vector<int32_t>& subtree_end = source.tree.subtree_end;
  std::vector<int32_t> end_local(block.stack_rows + block.num_tokens);
  const auto count_below = [&](int32_t end) {
    if (block.ranges.size() == 1)
      return std::clamp<int32_t>(end - block.ranges[0].begin, 0, static_cast<int32_t>(block.num_tokens));
    return static_cast<int32_t>(std::lower_bound(numbers.begin(), numbers.end(), end) - numbers.begin());
  };
  for (int64_t j = 0; j < block.stack_rows; ++j)
    end_local[j] = count_below(subtree_end[source.stack_tokens[j]]);
  for (int64_t i = 0; i < block.num_tokens; ++i)
    end_local[block.stack_rows + i] = count_below(subtree_end[numbers[i]]);
  return end_local;
}

// Adds the tokens' records, with -1 for tokens that have none, unless no token has one.
void add_experts(const std::vector<std::span<const uint16_t>>& records, const ModelConfig& config,
                 HostToDeviceBatch& upload, at::Tensor* to) {
  const int64_t chosen = config.experts_per_token, layers = config.num_sparse_layers();
  const auto size = static_cast<size_t>(layers * chosen);
  if (std::ranges::all_of(records, &std::span<const uint16_t>::empty)) return;
  std::vector<int64_t> experts(records.size() * size, -1);
  for (size_t t = 0; t < records.size(); ++t) {
    if (records[t].empty()) continue;
    BOUGH_CHECK(records[t].size() == size, "a token has ", records[t].size(),
                " recorded experts, the model chooses ", chosen, " in each of ", layers, " layers");
    std::ranges::copy(records[t], experts.begin() + static_cast<std::ptrdiff_t>(t * size));
  }
  upload.add(experts, to);
}

}  // namespace

void make_pass_input(const PassSource& source, HostToDeviceBatch& upload, PassInput& input) {
  const auto& [tree, block, batch, stack_tokens, flat_counts, recorded, context_ranks, least_run] = source;
  input = {};
  std::vector<int64_t> tokens, positions, numbers, counts;
  std::vector<std::span<const uint16_t>> experts;
  for (std::vector<int64_t>* each : {&tokens, &positions, &numbers}) each->reserve(block.num_tokens);
  for (const auto& range : block.ranges)
    for (int32_t t = range.begin; t < range.end; ++t) {
      const ReplayedToken* replay = batch.replay_of(tree.tokens[t]);
      tokens.push_back(batch.token_of(tree.tokens[t]));
      input.is_sampled.push_back((tree.tokens[t] & kDrawnMark) != 0);
      if (batch.replayed) input.replays.push_back(replay ? replay->pages : std::span<const uint16_t>());
      if (recorded) experts.push_back(replay ? replay->experts : std::span<const uint16_t>());
      positions.push_back(tree.depth[t]);
      numbers.push_back(t);
      if (!flat_counts.empty()) counts.push_back(flat_counts[static_cast<size_t>(t)]);
    }
  const std::vector<int32_t> end_local = local_ends(source, numbers);
  if (recorded) add_experts(experts, *recorded, upload, &input.experts_TLK);
  if (!counts.empty()) upload.add(counts, &input.flat_counts_T);
  upload.add(tokens, &input.tokens_T);
  upload.add(positions, &input.positions_T);
  if (context_ranks) {
    input.shared =
        std::make_shared<ContextPass>(*context_ranks, block.stack_rows, end_local, least_run, upload);
    return;
  }
  add_key_ends(upload, end_local, block.stack_rows, &input.ends);
  if (least_run > 0) input.segments = cut_into_segments(end_local, block.stack_rows, least_run);
  add_segments(upload, input.segments);
}

}  // namespace bough
