#include "kernels/paged_attention/paged_plan.h"

#include <gtest/gtest.h>

#include <map>

#include "base/random.h"
#include "kernels/paged_attention/group_tables.h"

namespace bough {
namespace {

struct Sequence {
  std::vector<int32_t> pages;
  int64_t length;
};

// The keys that a token of the pass attends to, as (page, place), and how often it attends to each.
using Keys = std::map<std::pair<int32_t, int32_t>, int>;

// Reads the work as the kernels do, from the integers that the device gets.
std::map<int32_t, Keys> keys_of(const PagedWork& work, const PagedLayout& layout) {
  std::vector<int32_t> numbers(static_cast<size_t>(layout.pages()) + work.pages.size(), -7);
  work.write(numbers.data(), layout);
  const auto* header = reinterpret_cast<const PagedHeader*>(numbers.data());
  const auto* rows = reinterpret_cast<const PagedRow*>(numbers.data() + layout.rows());
  const int32_t* pages = numbers.data() + layout.pages();
  std::map<int32_t, Keys> keys;
  std::map<int32_t, std::map<int32_t, int32_t>> first_key_of_part;  // token -> part -> first key
  std::map<int32_t, int> finished;
  const auto visit = [&](const PagedItem& item) {
    EXPECT_LT(item.first_key, item.key_end);
    EXPECT_LE(item.min_limit, item.key_end);
    for (int32_t r = item.row_begin; r < item.row_begin + item.num_rows; ++r) {
      const PagedRow& row = rows[r];
      EXPECT_LE(item.min_limit, row.limit);
      for (int32_t key = item.first_key; key < std::min(item.key_end, row.limit); ++key)
        ++keys[row.token][{pages[item.page_begin + (key - item.first_key) / 16], key % 16}];
      if (row.part < 0) ++finished[row.token];
      else EXPECT_TRUE(first_key_of_part[row.token].emplace(row.part, item.first_key).second);
    }
  };
  const auto* large = reinterpret_cast<const PagedItem*>(numbers.data() + layout.large());
  const auto* small = reinterpret_cast<const PagedItem*>(numbers.data() + layout.small());
  for (int32_t i = 0; i < header->num_large; ++i) visit(large[i]);
  for (int32_t i = 0; i < header->num_small; ++i) visit(small[i]);
  const auto* merges = reinterpret_cast<const PagedMerge*>(numbers.data() + layout.merges());
  for (int32_t i = 0; i < header->num_merges; ++i) {
    const auto& parts = first_key_of_part[merges[i].token];
    EXPECT_EQ(static_cast<int32_t>(parts.size()), merges[i].part_end - merges[i].part_begin);
    EXPECT_EQ(parts.begin()->first, merges[i].part_begin);
    int32_t before = -1;
    for (const auto& [part, first_key] : parts) {
      EXPECT_LT(before, first_key) << "parts are joined in the order of their keys";
      before = first_key;
    }
    ++finished[merges[i].token];
  }
  for (const auto& [token, times] : finished) EXPECT_EQ(times, 1) << "token " << token;
  EXPECT_EQ(finished.size(), keys.size());
  return keys;
}

// The keys of each token for one key/value head of work that is planned per head.
std::map<int32_t, Keys> keys_of_head(PagedWork work, int32_t group) {
  const auto is_other = [&](const PagedItem& item) { return item.group != group; };
  std::erase_if(work.large, is_other);
  std::erase_if(work.small, is_other);
  std::erase_if(work.merges, [&](const PagedMerge& merge) { return merge.group != group; });
  return keys_of(work, work.layout());
}

TEST(PagedWork, EveryTokenSeesEachOfItsKeysOnce) {
  const CounterRandom random(11, Purpose::test);
  for (uint64_t round = 0; round < 60; ++round) {
    uint64_t draw = 0;
    const auto below = [&](int64_t n) {
      return static_cast<int64_t>(random.below(static_cast<uint64_t>(n), round, draw++));
    };
    int32_t next_page = 0;
    std::vector<Sequence> sequences;
    std::vector<PagedSegment> segments;
    const int64_t num_sequences = 1 + below(20);
    for (int64_t s = 0; s < num_sequences; ++s) {
      Sequence sequence;
      if (s > 0 && below(4) > 0) {
        const Sequence& other = sequences[static_cast<size_t>(below(s))];
        const int64_t shared = below(other.length / 16 + 1);
        sequence.pages.assign(other.pages.begin(), other.pages.begin() + shared);
      }
      const auto shared = static_cast<int64_t>(sequence.pages.size()) * 16;
      sequence.length = shared + 1 + below(below(4) == 0 ? 2500 : 40);
      while (static_cast<int64_t>(sequence.pages.size()) < pages_for(sequence.length))
        sequence.pages.push_back(next_page++);
      sequences.push_back(std::move(sequence));
    }
    for (const Sequence& sequence : sequences) {
      const int64_t count = below(3) == 0 ? 1 + below(std::min<int64_t>(sequence.length, 60)) : 1;
      segments.push_back({sequence.pages, sequence.length - count, count});
    }
    const int64_t groups = 1 + below(4), heads = groups * (1 + below(9));
    const PagedWork work = plan_paged_work(segments, heads, groups);
    PagedLayout layout = work.layout();
    EXPECT_TRUE(work.fits(layout));
    if (below(2) == 0)
      layout = {layout.max_large + 3, layout.max_small + 1, layout.max_rows + 2, layout.max_merges + 5,
                layout.max_tokens + 7};
    auto keys = keys_of(work, layout);
    int32_t token = 0;
    for (const PagedSegment& segment : segments) {
      for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i, ++token) {
        Keys expected;
        for (int64_t j = 0; j <= i; ++j)
          expected[{segment.pages[static_cast<size_t>(j / 16)], static_cast<int32_t>(j % 16)}] = 1;
        ASSERT_EQ(keys[token], expected) << "round " << round << ", token " << token;
        EXPECT_EQ(work.slots[static_cast<size_t>(token)],
                  segment.pages[static_cast<size_t>(i / 16)] * 16 + i % 16);
      }
    }
    for (const PagedItem& item : work.small) EXPECT_LE(item.num_rows * heads / groups, kPagedSmallEntries);
    for (const PagedItem& item : work.large)
      EXPECT_TRUE(item.num_rows == 1 || item.num_rows * heads / groups <= kPagedLargeEntries);
  }
}

// Filling the tables with the pages of a selection gives the keys of a plan with this selection.
TEST(PagedWork, OpenTablesTakeAnyPages) {
  const CounterRandom random(12, Purpose::test);
  for (uint64_t round = 0; round < 20; ++round) {
    uint64_t draw = 0;
    const auto below = [&](int64_t n) {
      return static_cast<int64_t>(random.below(static_cast<uint64_t>(n), round, draw++));
    };
    const int64_t groups = 1 + below(3), heads = groups * (1 + below(5));
    std::vector<std::vector<int32_t>> tables(static_cast<size_t>(2 + below(9)));
    std::vector<PagedSegment> segments;
    std::vector<OpenSegment> open;
    std::vector<std::vector<int32_t>> lists;
    for (auto& table : tables) {
      const int64_t length = 1 + below(900),
                    count = below(3) == 0 ? 1 + below(std::min<int64_t>(length, 30)) : 1;
      for (int64_t i = 0; i < pages_for(length); ++i) table.push_back(static_cast<int32_t>(below(5000)));
      const bool is_open = count == 1 && below(3) > 0;
      const int64_t kept = is_open ? 1 + below(std::ssize(table)) : std::ssize(table);
      if (is_open) open.push_back({segments.size(), kept});
      segments.push_back({table, length - count, count});
      for (int64_t g = 0; g < groups; ++g) {
        std::vector<int32_t>& list = lists.emplace_back();  // every third page or so, and the last
        for (int32_t i = 0; i < static_cast<int32_t>(table.size()) - 1 && std::ssize(list) < kept - 1; ++i)
          if (std::ssize(table) - 1 - i <= kept - 1 - std::ssize(list) || below(3) == 0) list.push_back(i);
        list.push_back(static_cast<int32_t>(table.size()) - 1);
      }
    }
    OpenPagedWork planned = plan_open_paged_work(segments, open, heads, groups);
    for (const int32_t slot : planned.work.slots) EXPECT_EQ(slot, -1);
    for (size_t i = 0; i < open.size(); ++i)
      for (int64_t g = 0; g < groups; ++g) {
        const size_t of_head = static_cast<size_t>(g), G = static_cast<size_t>(groups);
        const auto& list = lists[open[i].segment * G + of_head];
        for (size_t j = 0; j < list.size(); ++j)
          planned.work.pages.at(static_cast<size_t>(planned.tables[i * G + of_head]) + j) =
              tables[open[i].segment][static_cast<size_t>(list[j])];
      }
    const PageSelection selection{lists, /*per_head=*/true};
    const PagedWork closed = plan_paged_work(segments, heads, groups, &selection);
    for (int32_t g = 0; g < groups; ++g) {
      EXPECT_EQ(keys_of_head(planned.work, g), keys_of_head(closed, g))
          << "round " << round << ", head " << g;
    }
  }
}

int64_t pages_read(const PagedWork& work) {
  int64_t pages = 0;
  for (const auto* list : {&work.large, &work.small})
    for (const PagedItem& item : *list) pages += pages_for(item.key_end - item.first_key);
  return pages;
}

// The positions of the pages' first keys have gaps, and each head has a different selection of pages. A token
// sees the selected keys up to its position.
TEST(PagedWork, HeadsSeeTheirSelectedPages) {
  const std::vector<int32_t> pages = {9, 4, 7, 2, 5}, first_keys = {0, 16, 48, 100, 130};
  const std::vector<PagedSegment> segments = {{pages, 135, 1, first_keys}, {pages, 100, 5, first_keys}};
  const std::vector<std::vector<int32_t>> lists = {{0, 2, 4}, {0, 1, 2, 3, 4}, {0, 3}, {3}};
  const PageSelection selection{lists, true};
  const PagedWork work = plan_paged_work(segments, 4, 2, &selection);
  EXPECT_TRUE(work.layout().per_head);
  EXPECT_FALSE(work.fits([&] {
    PagedLayout layout = work.layout();
    layout.per_head = false;
    return layout;
  }()));
  std::map<std::pair<int32_t, int32_t>, int32_t> seen;  // (token, head) -> keys
  for (const auto* list : {&work.large, &work.small})
    for (const PagedItem& item : *list)
      for (int32_t r = item.row_begin; r < item.row_begin + item.num_rows; ++r) {
        const PagedRow& row = work.rows[static_cast<size_t>(r)];
        seen[{row.token, item.group}] += std::min(item.key_end, row.limit) - item.first_key;
      }
  EXPECT_EQ((seen[{0, 0}]), 16 + 16 + 6);
  EXPECT_EQ((seen[{0, 1}]), 4 * 16 + 6);
  for (int32_t i = 0; i < 5; ++i) {
    EXPECT_EQ((seen[{1 + i, 0}]), 16 + i + 1);
    EXPECT_EQ((seen[{1 + i, 1}]), i + 1);
    EXPECT_EQ(work.slots[static_cast<size_t>(1 + i)], 2 * 16 + i);
  }
  EXPECT_EQ(work.slots[0], 5 * 16 + 5);
}

TEST(PagedWork, SharedPagesAreReadOnceForAllSamples) {
  const auto tables = group_tables(16, 8, 64, 4);
  const PagedWork work = plan_paged_work(last_tokens(tables), 16, 8);
  EXPECT_EQ(pages_read(work), 16 * (64 + 8 * 4));
  // With only one common page, merging the parts would cost more than reading the page once saves.
  EXPECT_EQ(pages_read(plan_paged_work(last_tokens(group_tables(16, 8, 1, 4)), 16, 8)), 16 * 8 * 5);
}

TEST(PagedWork, LongContextsOfFewRowsAreCutForTheWholeDevice) {
  const auto tables = group_tables(1, 1, 0, 2048);
  const PagedWork work = plan_paged_work(last_tokens(tables), 32, 8);
  EXPECT_EQ(work.small.size(), 128u);
  EXPECT_EQ(pages_read(work), 2048);
  EXPECT_EQ(work.num_parts, 128);
  // Many rows of usual length are not cut, so nothing is merged.
  EXPECT_EQ(plan_paged_work(last_tokens(group_tables(256, 1, 0, 64)), 16, 8).merges.size(), 0u);
}

}  // namespace
}  // namespace bough
