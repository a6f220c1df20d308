#include "rollout/expert_records.h"

#include <ATen/ops/full.h>

#include <algorithm>

#include "base/error.h"
#include "rollout/scheduler.h"

namespace bough {

ExpertRecords::ExpertRecords(const ModelConfig& config, int64_t max_pages, int32_t version)
    : num_layers_(config.num_sparse_layers()),
      num_chosen_(config.experts_per_token),
      row_size_(num_layers_ * num_chosen_),
      max_chunks_(static_cast<size_t>(kChunksPerPage * max_pages)),
      version_(version) {}

// Appends the rows of the sequence's next page. Rows that the sequence has already stay.
void ExpertRecords::take_chunk(SequenceExperts& sequence,
                               const std::shared_ptr<const ExpertChunk>& chunk) const {
  const auto begin = sequence.chunks.size() * static_cast<size_t>(kPageTokens * row_size_);
  const size_t known = std::min(sequence.rows.size() - begin, chunk->rows.size());
  sequence.rows.insert(sequence.rows.end(), chunk->rows.begin() + static_cast<std::ptrdiff_t>(known),
                       chunk->rows.end());
  sequence.chunks.push_back(chunk);
}

ExpertRecords::Key ExpertRecords::key_of(const SequenceExperts& sequence,
                                         const std::vector<int32_t>& tokens) {
  Key key{.previous = sequence.chunks.empty() ? 0 : sequence.chunks.back()->id};
  std::copy_n(tokens.begin() + std::ssize(sequence.chunks) * kPageTokens, kPageTokens, key.tokens.begin());
  return key;
}

std::shared_ptr<const ExpertChunk> ExpertRecords::find(const Key& key) {
  const auto found = known_.find(key);
  if (found == known_.end()) return nullptr;
  order_.splice(order_.end(), order_, found->second.place);
  return found->second.chunk;
}

void ExpertRecords::insert(const Key& key, const std::shared_ptr<const ExpertChunk>& chunk) {
  if (known_.size() >= max_chunks_) {
    known_.erase(order_.front());
    order_.pop_front();
  }
  known_[key] = {chunk, order_.insert(order_.end(), key)};
}

// Returns the rows of the entry's sequence. They cover at least the tokens before the entry's first.
SequenceExperts& ExpertRecords::experts_of(const PassEntry& entry) {
  SequenceExperts& own = entry.sample ? entry.sample->experts : entry.request->experts;
  const std::vector<int32_t>& tokens = entry.tokens();
  if (own.version != version_) {
    rerouted_tokens_ += num_rows(own.rows);
    if (own.rows.size() > own.stale.size()) own.stale = own.rows;
    own.rows.clear();
    own.chunks.clear();
    own.version = version_;
  }
  const SequenceExperts& prompt = entry.request->experts;
  if (entry.sample && own.rows.empty() && prompt.version == version_) {
    const auto size = static_cast<size_t>(entry.request->prompt_length() * row_size_);
    own.rows.assign(prompt.rows.begin(),
                    prompt.rows.begin() + std::ptrdiff_t(std::min(size, prompt.rows.size())));
    own.chunks = prompt.chunks;
  }
  // The rows of pages that other sequences have computed.
  while (num_rows(own.rows) < entry.begin) {
    const auto page = static_cast<size_t>(entry.table().pages.at(own.chunks.size()));
    BOUGH_CHECK(page < of_page_.size() && of_page_[page], "no experts are recorded for page ", page);
    take_chunk(own, of_page_[page]);
  }
  // The rows of pages that were evicted since.
  const auto has_next_page = [&] {
    return std::ssize(tokens) >= (std::ssize(own.chunks) + 1) * kPageTokens &&
           num_rows(own.rows) < (std::ssize(own.chunks) + 1) * kPageTokens;
  };
  while (has_next_page()) {
    const auto chunk = find(key_of(own, tokens));
    if (!chunk) break;
    take_chunk(own, chunk);
  }
  return own;
}

at::Tensor ExpertRecords::recorded(const Pass& pass) {
  at::Tensor recorded_TLK;
  int64_t* to = nullptr;
  int64_t num_tokens = 0, token = 0;
  for (const PassEntry& entry : pass.entries) num_tokens += entry.count;
  for (const PassEntry& entry : pass.entries) {
    const SequenceExperts& own = experts_of(entry);
    const int64_t end = std::min(entry.begin + entry.count, num_rows(own.rows));
    if (end > entry.begin && !to) {
      recorded_TLK = at::full({num_tokens, num_layers_, num_chosen_}, -1, at::kLong);
      to = static_cast<int64_t*>(recorded_TLK.mutable_data_ptr());
    }
    if (end > entry.begin) {
      std::copy(own.rows.begin() + entry.begin * row_size_, own.rows.begin() + end * row_size_,
                to + token * row_size_);
      replayed_tokens_ += end - entry.begin;
    }
    token += entry.count;
  }
  return recorded_TLK;
}

void ExpertRecords::add(const Pass& pass, const at::Tensor& used_TLK) {
  BOUGH_CHECK(used_TLK.defined() && used_TLK.is_contiguous() && used_TLK.size(1) == num_layers_ &&
                  used_TLK.size(2) == num_chosen_,
              "a pass used experts in other layers than the model has");
  const auto* used = static_cast<const int64_t*>(used_TLK.const_data_ptr());
  for (const PassEntry& entry : pass.entries) {
    SequenceExperts& own = entry.sample ? entry.sample->experts : entry.request->experts;
    const int64_t known = std::clamp<int64_t>(num_rows(own.rows) - entry.begin, 0, entry.count);
    own.rows.insert(own.rows.end(), used + known * row_size_, used + entry.count * row_size_);
    used += entry.count * row_size_;
  }
}

void ExpertRecords::keep_pages(const Pass& pass) {
  for (const PassEntry& entry : pass.entries) {
    SequenceExperts& own = entry.sample ? entry.sample->experts : entry.request->experts;
    const std::vector<int32_t>& tokens = entry.tokens();
    const int64_t end = (entry.begin + entry.count) / kPageTokens;
    while (std::ssize(own.chunks) < end) {
      const Key key = key_of(own, tokens);
      const auto begin = own.rows.begin() + std::ssize(own.chunks) * kPageTokens * row_size_;
      ExpertChunk rows{.id = next_id_++, .rows = {begin, begin + kPageTokens * row_size_}};
      std::shared_ptr<const ExpertChunk> chunk = find(key);
      // Two sequences may have computed the same tokens in one pass. Each keeps its own rows.
      if (chunk && chunk->rows != rows.rows) rows.id = chunk->id;
      if (!chunk || chunk->rows != rows.rows) {
        const bool is_new = !chunk;
        chunk = std::make_shared<const ExpertChunk>(std::move(rows));
        if (is_new) insert(key, chunk);
      }
      own.chunks.push_back(std::move(chunk));
    }
    const std::vector<int32_t>& pages = entry.table().pages;
    for (int64_t i = entry.begin / kPageTokens; i < end; ++i) {
      const auto page = static_cast<size_t>(pages[static_cast<size_t>(i)]);
      if (of_page_.size() <= page) of_page_.resize(page + 1);
      of_page_[page] = own.chunks[static_cast<size_t>(i)];
    }
  }
}

RoutedExperts ExpertRecords::of(const SequenceExperts& sequence, int64_t num_tokens) const {
  RoutedExperts routed{.num_layers = num_layers_, .num_chosen = num_chosen_, .experts = sequence.rows};
  if (sequence.stale.size() > sequence.rows.size())
    routed.experts.insert(routed.experts.end(), sequence.stale.begin() + std::ssize(sequence.rows),
                          sequence.stale.end());
  if (routed.num_rows() < num_tokens) return {};
  routed.truncate(num_tokens);
  return routed;
}

SequenceExperts ExpertRecords::restored(const RoutedExperts& routed) const {
  const bool is_ours = routed.num_layers == num_layers_ && routed.num_chosen == num_chosen_;
  return {.rows = is_ours ? routed.experts : std::vector<uint16_t>(),
          .stale = {},
          .version = version_,
          .chunks = {}};
}

void ExpertRecords::new_weights(int32_t version) {
  version_ = version;
  known_.clear();
  order_.clear();
  of_page_.clear();
}

}  // namespace bough
