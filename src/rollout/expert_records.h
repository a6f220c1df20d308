// Records which experts a mixture used for each token, and replays the record when tokens are computed again.
//
// Row i of a sequence belongs to token i. The row that was recorded when the token was first computed stays,
// also if the sequence is preempted, its pages are evicted, or a sibling computes the same prefix again. Full
// pages of tokens are kept as chunks: a sequence that takes another sequence's pages takes their rows, and
// one that computes a known prefix again replays the rows (the bf16 products of two passes may choose other
// experts). After new weights, tokens are routed afresh.
//
// Memory: a row takes two bytes per expert and layer. Each sequence in flight has its rows, and at most
// kChunksPerPage chunks per page of the KV cache are kept beyond those that pages and sequences hold.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>
#include <vector>

#include "data/trajectory.h"
#include "models/config.h"
#include "rollout/page_pool.h"

namespace bough {

struct Pass;
struct PassEntry;

// The rows of a page of tokens. `id`: unique; it identifies the chunk's tokens and all tokens before them.
struct ExpertChunk {
  uint64_t id = 0;
  std::vector<uint16_t> rows;
};

// The rows of one sequence.
struct SequenceExperts {
  std::vector<uint16_t> rows;   // may be more than the tokens with keys and values: those are replayed
  std::vector<uint16_t> stale;  // of earlier weights; `rows` replaces them from the front
  int32_t version = 0;          // of the weights of `rows`
  std::vector<std::shared_ptr<const ExpertChunk>> chunks;  // of the leading full pages
};

class ExpertRecords {
 public:
  static constexpr int64_t kChunksPerPage = 2;

  // max_pages: of the KV cache. version: of the weights.
  ExpertRecords(const ModelConfig& config, int64_t max_pages, int32_t version);

  // The recorded experts of a pass's tokens, int64 [T, layers, K] on the CPU, -1 in rows of tokens without a
  // record. Undefined if no token has one.
  at::Tensor recorded(const Pass& pass);
  // Adds the rows of a pass's tokens. used_TLK: the experts that they used, int64 on the CPU.
  void add(const Pass& pass, const at::Tensor& used_TLK);
  // Keeps the rows of the pages that the pass has completed. Call it after Scheduler::commit().
  void keep_pages(const Pass& pass);
  // The rows of a sequence's first `num_tokens` tokens. Empty if a row is missing.
  RoutedExperts of(const SequenceExperts& sequence, int64_t num_tokens) const;
  // Forgets everything, because the weights changed. Sequences are routed afresh when they are computed.
  void new_weights(int32_t version);

  int64_t replayed_tokens() const { return replayed_tokens_; }  // computed with a recorded row
  int64_t rerouted_tokens() const { return rerouted_tokens_; }  // whose record new weights have made stale

  // The rows of a partial rollout that another process has generated.
  SequenceExperts restored(const RoutedExperts& routed) const;

 private:
  struct Key {
    uint64_t previous = 0;  // id of the chunk before; 0: none
    std::array<int32_t, kPageTokens> tokens = {};
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const { return page_hash(key.previous, key.tokens); }
  };
  struct Known {
    std::shared_ptr<const ExpertChunk> chunk;
    std::list<Key>::iterator place;  // in order_
  };
  int64_t num_rows(const std::vector<uint16_t>& rows) const {
    return static_cast<int64_t>(rows.size()) / row_size_;
  }
  SequenceExperts& experts_of(const PassEntry& entry);
  void take_chunk(SequenceExperts& sequence, const std::shared_ptr<const ExpertChunk>& chunk) const;
  static Key key_of(const SequenceExperts& sequence, const std::vector<int32_t>& tokens);
  std::shared_ptr<const ExpertChunk> find(const Key& key);
  void insert(const Key& key, const std::shared_ptr<const ExpertChunk>& chunk);

  int64_t num_layers_, num_chosen_, row_size_;
  size_t max_chunks_;
  int32_t version_;
  uint64_t next_id_ = 1;
  int64_t replayed_tokens_ = 0, rerouted_tokens_ = 0;
  std::unordered_map<Key, Known, KeyHash> known_;
  std::list<Key> order_;                                     // least recently used first
  std::vector<std::shared_ptr<const ExpertChunk>> of_page_;  // by page number
};

}  // namespace bough
