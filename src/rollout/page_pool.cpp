#include "rollout/page_pool.h"

#include <algorithm>

#include "base/error.h"

namespace bough {

uint64_t page_hash(uint64_t previous, std::span<const int32_t, kPageTokens> tokens) {
  uint64_t hash = previous * 0x9E3779B97F4A7C15u;
  for (const int32_t token : tokens) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0xFF51AFD7ED558CCDu;
    hash ^= hash >> 32;
  }
  return hash;
}

size_t PagePool::KeyHash::operator()(const Key& key) const {
  return (page_hash(key.previous_serial, key.tokens) ^ key.sparse) * 0x9E3779B97F4A7C15u;
}

PagePool::PagePool(int64_t max_pages) : max_pages_(max_pages) {
  BOUGH_CHECK(max_pages > 0 && max_pages <= INT32_MAX, "max_pages=", max_pages);
}

PagePool::Key PagePool::key_of(uint64_t previous_serial, const TokenPath& path, int64_t page_index) {
  Key key;
  key.previous_serial = previous_serial;
  const int64_t begin = page_index * kPageTokens;
  std::copy_n(path.tokens.begin() + begin, kPageTokens, key.tokens.begin());
  for (int64_t i = 0; i < kPageTokens; ++i)
    key.sparse |= static_cast<uint32_t>(path.is_sparse(begin + i)) << i;
  return key;
}

void PagePool::evict_oldest() {
  const int32_t index = cached_.begin()->second;
  Page& page = pages_[static_cast<size_t>(index)];
  cached_.erase(cached_.begin());
  index_.erase(page.key);
  page.serial = 0;
  free_.push_back(index);
}

std::optional<int32_t> PagePool::take() {
  if (free_.empty()) {
    const bool can_grow = num_pages() < max_pages_;
    const bool many_cached = 4 * num_cached() > num_pages();
    if (can_grow && !many_cached) {
      pages_.emplace_back();
      free_.push_back(static_cast<int32_t>(num_pages() - 1));
    } else if (!cached_.empty()) {
      evict_oldest();
    } else if (can_grow) {
      pages_.emplace_back();
      free_.push_back(static_cast<int32_t>(num_pages() - 1));
    } else {
      return std::nullopt;
    }
  }
  const int32_t page = free_.back();
  free_.pop_back();
  return page;
}

void PagePool::hold(int32_t index) {
  Page& page = pages_[static_cast<size_t>(index)];
  if (page.references++ == 0) {
    ++num_held_;
    if (page.serial != 0) cached_.erase(page.released_at);
  }
}

bool PagePool::append_page(PageTable& table) {
  const std::optional<int32_t> page = take();
  if (!page) return false;
  hold(*page);
  table.pages.push_back(*page);
  return true;
}

int64_t PagePool::match(const TokenPath& path, int64_t max_tokens, PageTable& table) {
  BOUGH_CHECK(table.pages.empty(), "match fills an empty table, got ", table.pages.size(), " pages");
  const int64_t limit = std::min<int64_t>(max_tokens, static_cast<int64_t>(path.tokens.size())) / kPageTokens;
  for (int64_t i = 0; i < limit; ++i) {
    const auto found = index_.find(key_of(table.serial, path, i));
    if (found == index_.end()) break;
    hold(found->second);
    table.pages.push_back(found->second);
    table.serial = pages_[static_cast<size_t>(found->second)].serial;
    ++table.num_published;
  }
  return table.num_published * kPageTokens;
}

int64_t PagePool::match_length(const TokenPath& path, int64_t max_tokens) const {
  const int64_t limit = std::min<int64_t>(max_tokens, static_cast<int64_t>(path.tokens.size())) / kPageTokens;
  uint64_t serial = 0;
  for (int64_t i = 0; i < limit; ++i) {
    const auto found = index_.find(key_of(serial, path, i));
    if (found == index_.end()) return i * kPageTokens;
    serial = pages_[static_cast<size_t>(found->second)].serial;
  }
  return limit * kPageTokens;
}

void PagePool::share(const PageTable& from, PageTable& to) {
  BOUGH_CHECK(to.pages.empty(), "share fills an empty table, got ", to.pages.size(), " pages");
  for (int64_t i = 0; i < from.num_published; ++i) {
    hold(from.pages[static_cast<size_t>(i)]);
    to.pages.push_back(from.pages[static_cast<size_t>(i)]);
  }
  to.num_published = from.num_published;
  to.serial = from.serial;
}

void PagePool::publish(const TokenPath& path, int64_t num_tokens, PageTable& table) {
  const int64_t full = num_tokens / kPageTokens;
  BOUGH_CHECK(full <= static_cast<int64_t>(table.pages.size()), "published ", full, " pages of ",
              table.pages.size());
  for (; table.num_published < full; ++table.num_published) {
    const int32_t index = table.pages[static_cast<size_t>(table.num_published)];
    const Key key = key_of(table.serial, path, table.num_published);
    const auto [entry, is_new] = index_.try_emplace(key, index);
    if (is_new) {
      Page& page = pages_[static_cast<size_t>(index)];
      page.serial = next_serial_++;
      page.key = key;
    }
    table.serial = pages_[static_cast<size_t>(entry->second)].serial;
  }
}

void PagePool::release(PageTable& table) {
  for (auto it = table.pages.rbegin(); it != table.pages.rend(); ++it) {
    Page& page = pages_[static_cast<size_t>(*it)];
    BOUGH_CHECK(page.references > 0, "page ", *it, " released more often than held");
    if (--page.references > 0) continue;
    --num_held_;
    if (page.serial == 0) {
      free_.push_back(*it);
    } else {
      page.released_at = next_release_++;
      cached_.emplace(page.released_at, *it);
    }
  }
  table = PageTable();
}

void PagePool::forget_prefixes() {
  BOUGH_CHECK(num_held_ == 0, num_held_, " pages are still held");
  while (!cached_.empty()) evict_oldest();
}

void PagePool::check_integrity(std::span<const PageTable* const> tables) const {
  std::vector<int32_t> references(pages_.size(), 0);
  for (const PageTable* table : tables) {
    for (const int32_t page : table->pages) {
      BOUGH_CHECK(page >= 0 && page < num_pages(), "page ", page, " of ", num_pages());
      ++references[static_cast<size_t>(page)];
    }
  }
  std::vector<bool> is_free(pages_.size(), false);
  for (const int32_t page : free_) {
    BOUGH_CHECK(!is_free[static_cast<size_t>(page)], "page ", page, " is free twice");
    is_free[static_cast<size_t>(page)] = true;
  }
  int64_t num_held = 0, num_published = 0;
  for (size_t i = 0; i < pages_.size(); ++i) {
    const Page& page = pages_[i];
    BOUGH_CHECK(page.references == references[i], "page ", i, " counts ", page.references, " holders, has ",
                references[i]);
    num_held += page.references > 0;
    num_published += page.serial != 0;
    const bool cached = page.references == 0 && page.serial != 0;
    BOUGH_CHECK(is_free[i] == (page.references == 0 && page.serial == 0), "page ", i,
                " is free and used, or lost");
    if (cached) {
      const auto entry = cached_.find(page.released_at);
      BOUGH_CHECK(entry != cached_.end() && entry->second == static_cast<int32_t>(i), "page ", i,
                  " is not cached");
    }
    if (page.serial != 0) {
      const auto entry = index_.find(page.key);
      BOUGH_CHECK(entry != index_.end() && entry->second == static_cast<int32_t>(i), "page ", i,
                  " is not indexed");
    }
  }
  BOUGH_CHECK(num_held == num_held_, "num_held=", num_held_, ", counted ", num_held);
  BOUGH_CHECK(static_cast<int64_t>(index_.size()) == num_published, "index ", index_.size(), ", published ",
              num_published);
  BOUGH_CHECK(num_cached() + num_held + static_cast<int64_t>(free_.size()) == num_pages(), "pages are lost");
}

}  // namespace bough
