#include "rollout/page_pool.h"

#include <gtest/gtest.h>

#include <deque>

#include "base/random.h"

namespace bough {
namespace {

std::vector<int32_t> tokens_of(int64_t length, int32_t first = 0) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < length; ++i) tokens.push_back(first + static_cast<int32_t>(i % 7));
  return tokens;
}

void compute(PagePool& pool, const std::vector<int32_t>& tokens, PageTable& table) {
  const auto length = static_cast<int64_t>(tokens.size());
  while (static_cast<int64_t>(table.pages.size()) < pages_for(length)) ASSERT_TRUE(pool.append_page(table));
  pool.publish(tokens, length, table);
}

TEST(PagePool, FindsThePublishedPrefixWhileHeldAndAfter) {
  PagePool pool(16);
  const auto tokens = tokens_of(40);
  PageTable first, second, third;
  compute(pool, tokens, first);
  EXPECT_EQ(pool.match(tokens, 40, second), 32) << "only full pages are published";
  EXPECT_EQ(second.pages, std::vector<int32_t>(first.pages.begin(), first.pages.begin() + 2));
  EXPECT_EQ(pool.match_length(tokens, 31), 16) << "no more than asked for";
  pool.release(first);
  pool.release(second);
  EXPECT_EQ(pool.num_held(), 0);
  EXPECT_EQ(pool.match(tokens, 40, third), 32);
  pool.release(third);
  pool.forget_prefixes();
  EXPECT_EQ(pool.match_length(tokens, 40), 0);
  pool.check_integrity({});
}

TEST(PagePool, OtherTokensBeforeAPageAreAnotherPrefix) {
  PagePool pool(16);
  auto tokens = tokens_of(32);
  PageTable table, other;
  compute(pool, tokens, table);
  tokens[3] += 1;  // the second page's tokens do not change
  EXPECT_EQ(pool.match_length(tokens, 32), 0);
  compute(pool, {tokens.begin(), tokens.begin() + kPageTokens}, other);
  EXPECT_EQ(pool.match_length(tokens, 32), 16) << "though a page with the second page's tokens is published";
}

TEST(PagePool, APageBehindAnEvictedOneIsNotFound) {
  PagePool pool(3);
  const auto tokens = tokens_of(32);
  PageTable table, other;
  compute(pool, tokens, table);
  pool.release(table);  // the last page is released first, so the second page is the older one
  ASSERT_TRUE(pool.append_page(other));
  EXPECT_EQ(pool.match_length(tokens, 32), 16) << "the end is evicted before the beginning";
  ASSERT_TRUE(pool.append_page(other));
  EXPECT_EQ(pool.match_length(tokens, 32), 0);
  ASSERT_TRUE(pool.append_page(other)) << "one was never used";
  EXPECT_FALSE(pool.append_page(other)) << "all pages are held";
  PageTable* tables[] = {&other};
  pool.check_integrity(tables);
}

TEST(PagePool, EqualPrefixesComputedAtOncePublishOnce) {
  PagePool pool(16);
  const auto tokens = tokens_of(48);
  PageTable first, second, found;
  compute(pool, tokens_of(32), first);
  compute(pool, tokens, second);
  EXPECT_EQ(pool.match(tokens, 48, found), 48);
  EXPECT_EQ(found.pages[0], first.pages[0]);
  EXPECT_EQ(found.pages[2], second.pages[2]) << "the longer one goes on from the common prefix";
  const PageTable* tables[] = {&first, &second, &found};
  pool.check_integrity(tables);
}

TEST(PagePool, RandomOperationsKeepItsInvariants) {
  const CounterRandom random(5, Purpose::test);
  PagePool pool(40);
  std::deque<PageTable> tables;
  std::deque<std::vector<int32_t>> texts;
  for (uint64_t step = 0; step < 4000; ++step) {
    const uint64_t choice = random.below(10, 0, step);
    if (choice < 5 && tables.size() < 12) {  // few different prefixes, so that many pages are shared
      std::vector<int32_t> tokens;
      const uint64_t length = 1 + random.below(90, 1, step);
      for (uint64_t i = 0; i < length; ++i) {
        tokens.push_back(
            static_cast<int32_t>(i < 32 ? i + random.below(2, 2, step) : random.below(2, 3 + i / 16, step)));
      }
      PageTable& table = tables.emplace_back();
      pool.match(tokens, static_cast<int64_t>(length) - 1, table);
      bool complete = true;
      while (complete && static_cast<int64_t>(table.pages.size()) < pages_for(static_cast<int64_t>(length))) {
        complete = pool.append_page(table);
      }
      if (complete) pool.publish(tokens, static_cast<int64_t>(length), table);
      texts.push_back(std::move(tokens));
    } else if (!tables.empty()) {
      const auto index = static_cast<int64_t>(random.below(tables.size(), 4, step));
      pool.release(tables[static_cast<size_t>(index)]);
      tables.erase(tables.begin() + index);
      texts.erase(texts.begin() + index);
    }
    if (step % 500 == 499) {
      for (PageTable& table : tables) pool.release(table);
      tables.clear();
      texts.clear();
      pool.forget_prefixes();
    }
    std::vector<const PageTable*> pointers;
    for (const PageTable& table : tables) pointers.push_back(&table);
    ASSERT_NO_THROW(pool.check_integrity(pointers)) << "after step " << step;
  }
  EXPECT_EQ(pool.num_held(), 0);
}

}  // namespace
}  // namespace bough
