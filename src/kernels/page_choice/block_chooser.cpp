#include "kernels/page_choice/block_chooser.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace bough {

BlockChooser::BlockChooser(std::span<const PagedSegment> segments, std::span<const uint8_t> is_sampled,
                           const SparsePolicy& policy, int64_t num_kv_heads)
    : policy_(policy), num_kv_heads_(static_cast<size_t>(num_kv_heads)) {
  size_t token = 0;
  for (const PagedSegment& segment : segments) {
    PagedSegment open = segment;  // the tokens of the segment that are not in segments_ yet
    open.count = 0;
    const auto close = [&] {
      if (open.count > 0) segments_.push_back(open);
    };
    for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i, ++token) {
      BOUGH_CHECK(token < is_sampled.size(), "got ", is_sampled.size(),
                  " marks of sampled tokens, expected one per token");
      const int64_t blocks = policy.blocks_for(i + 1), budget = policy.budget_of(i + 1);
      if (is_sampled[token] != 0) {
        blocks_read_ += std::min(blocks, budget);
        blocks_in_context_ += blocks;
      }
      if (is_sampled[token] == 0 || blocks <= budget) {
        ++open.count;
        continue;
      }
      close();
      choosing_.push_back(segments_.size());
      segments_.push_back({segment.pages, i, 1});
      queries_.push_back({.token = static_cast<int64_t>(token),
                          .pages = segment.pages.first(static_cast<size_t>(pages_for(i + 1))),
                          .budget = budget,
                          .position = i});
      open.begin = i + 1;
      open.count = 0;
    }
    close();
  }
  if (queries_.empty()) return;
  lists_.resize(segments_.size() * num_kv_heads_);
  if (policy_.parts_per_page() > 1) masks_.resize(lists_.size());
  for (size_t i = 0; i < lists_.size(); ++i) {
    const PagedSegment& segment = segments_[i / num_kv_heads_];
    lists_[i].resize(static_cast<size_t>(pages_for(segment.begin + segment.count)));
    std::iota(lists_[i].begin(), lists_[i].end(), 0);
    if (!masks_.empty()) masks_[i].assign(lists_[i].size(), kAllKeys);
  }
}

const std::vector<int32_t>& BlockChooser::complete() {
  if (complete_.empty()) complete_ = complete_blocks(segments_, policy_);
  return complete_;
}

BlockChooser::Lists BlockChooser::choose(const at::Tensor& q_TNH, const at::Tensor& summaries) const {
  Lists chosen(queries_.size() * num_kv_heads_);
  choose_blocks(q_TNH, summaries, policy_, queries_, chosen);
  return chosen;
}

PageSelection BlockChooser::selection(const Lists& chosen) {
  BOUGH_CHECK(chosen.size() == queries_.size() * num_kv_heads_, chosen.size(), " lists for ", queries_.size(),
              " queries");
  PagesOfBlocks own;
  for (size_t i = 0; i < choosing_.size(); ++i)
    for (size_t g = 0; g < num_kv_heads_; ++g) {
      const std::vector<int32_t>& blocks = chosen[i * num_kv_heads_ + g];
      const size_t to = choosing_[i] * num_kv_heads_ + g;
      own.set(blocks, std::ssize(queries_[i].pages), policy_);
      lists_[to].swap(own.pages);
      if (!masks_.empty()) masks_[to].swap(own.masks);
    }
  return {.lists = lists_, .per_head = true, .masks = masks_};
}

}  // namespace bough
