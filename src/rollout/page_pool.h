// Manages the pages of the KV cache: reference counts, and a prefix index that finds tokens whose keys and
// values are computed already. Samples of one prompt, prompts that begin with the same tokens, turns of an
// agent and preempted samples find their pages in the index. This file has no tensors.
//
// A page holds the keys and values of kPageTokens consecutive tokens in every layer. A full page can be
// published: the index then finds it for sequences with the same tokens up to the page's end. Keys of the
// index are (serial number of the previous page, the page's tokens, which of them were computed by sparse
// attention). Serial numbers are never used twice. So a page whose previous page was evicted cannot be found
// any more, and never under another prefix. Published pages that no table holds stay cached. When pages are
// needed, cached pages are evicted, the least recently released first. A table always holds the whole prefix,
// and releases its last page first.
//
// Invariants (check_integrity): every page below num_pages() is free, cached (published, not held) or held.
// The reference counts equal the number of tables that hold the page. The index and the pages' serials agree.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "kernels/paged_attention/pages.h"

namespace bough {

// The pages of one sequence, in order; token t lies in pages[t / kPageTokens].
struct PageTable {
  std::vector<int32_t> pages;
  int64_t num_published = 0;  // leading pages that are published
  uint64_t serial = 0;        // of the last published page; 0 if there is none
};

// Tokens whose pages are looked up or published.
struct TokenPath {
  TokenPath(std::span<const int32_t> all) : tokens(all) {}
  TokenPath(const std::vector<int32_t>& all) : tokens(all) {}
  TokenPath(std::span<const int32_t> all, std::span<const uint8_t> is_sparse, int64_t sparse_after)
      : tokens(all), sparse(is_sparse), sparse_from(sparse_after) {}

  // Whether token i is computed by sparse attention, which changes its keys and values.
  bool is_sparse(int64_t i) const {
    return i >= sparse_from ||
           (i < static_cast<int64_t>(sparse.size()) && sparse[static_cast<size_t>(i)] != 0);
  }

  std::span<const int32_t> tokens;
  std::span<const uint8_t> sparse = {};  // 1: sparse; tokens without an entry: 0
  int64_t sparse_from = INT64_MAX;       // all tokens from this index on are sparse
};

// Hashes a full page: its tokens, and the number of what comes before them.
uint64_t page_hash(uint64_t previous, std::span<const int32_t, kPageTokens> tokens);

class PagePool {
 public:
  // Pages are numbered 0 ... max_pages - 1 and handed out lowest first, so that storage can grow with use.
  explicit PagePool(int64_t max_pages);

  // Appends a page, held once, to `table`. Returns false if every page is held. Takes a free page if there is
  // one. Else evicts a cached page if more than a quarter of num_pages() are cached or no new page is left.
  // Else takes a new page.
  bool append_page(PageTable& table);
  // Fills `table`, which must be empty, with the pages of the longest published prefix of `path` of at most
  // `max_tokens` tokens, and holds them. Returns the number of tokens in these pages.
  int64_t match(const TokenPath& path, int64_t max_tokens, PageTable& table);
  // Returns the number of tokens that match() would cover.
  int64_t match_length(const TokenPath& path, int64_t max_tokens) const;
  // Fills `to`, which must be empty, with the published pages of `from`, and holds them.
  void share(const PageTable& from, PageTable& to);
  // Publishes the full pages among the first `num_tokens` tokens of `table`. Their keys and values must be
  // computed.
  void publish(const TokenPath& path, int64_t num_tokens, PageTable& table);
  // Releases all pages of the table and empties it.
  void release(PageTable& table);
  // Evicts all published pages, because the weights have changed. Throws InternalError if a page is held.
  void forget_prefixes();

  int64_t max_pages() const { return max_pages_; }
  int64_t num_pages() const { return static_cast<int64_t>(pages_.size()); }  // ever handed out
  int64_t num_held() const { return num_held_; }
  int64_t num_cached() const { return static_cast<int64_t>(cached_.size()); }

  // Checks the invariants by BOUGH_CHECK; `tables` are all tables that hold pages.
  void check_integrity(std::span<const PageTable* const> tables) const;

 private:
  struct Key {
    uint64_t previous_serial = 0;
    std::array<int32_t, kPageTokens> tokens = {};
    uint32_t sparse = 0;  // one bit per token
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const;
  };
  struct Page {
    int32_t references = 0;
    uint64_t serial = 0;       // 0: not published
    uint64_t released_at = 0;  // its key in cached_ while no table holds it
    Key key;
  };

  std::optional<int32_t> take();
  void evict_oldest();
  void hold(int32_t page);
  static Key key_of(uint64_t previous_serial, const TokenPath& path, int64_t page_index);

  int64_t max_pages_;
  int64_t num_held_ = 0;
  uint64_t next_serial_ = 1;
  uint64_t next_release_ = 1;
  std::vector<Page> pages_;
  std::vector<int32_t> free_;
  std::map<uint64_t, int32_t> cached_;  // by released_at
  std::unordered_map<Key, int32_t, KeyHash> index_;
};

}  // namespace bough
