#include "rollout/attention_work.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace bough {

namespace {

static_assert(kPagedPageTokens == kPageTokens);

// Blocks of a launch: some for each multiprocessor of the largest GPUs. A constant, so that results are the same on
// all.
constexpr int64_t kWantedBlocks = 1024;
constexpr int64_t kTilePages = 4;  // what a block reads at once
// Of an item that was cut, for each fragment of query vectors: its parts are then at most a quarter of what it reads.
constexpr int64_t kLeastPages = 2 * kTilePages;
// Sharing p pages among r rows saves reading (r - 1) p; the parts of each row, written and read, cost about as much as
// two pages.
constexpr int64_t kPagesOfAPart = 2;

struct Row {
  int32_t token, limit;
  std::span<const int32_t> pages;
};
struct Piece {  // rows that attend to pages [page_begin, page_end) of the first one's
  std::vector<Row> rows;
  int64_t page_begin, page_end;
};

class Planner {
 public:
  Planner(int64_t num_heads, int64_t num_groups)
      : heads_(num_heads / num_groups),
        num_groups_(num_groups),
        max_rows_(std::max<int64_t>(1, kPagedLargeEntries / heads_)) {}

  void add_segments(std::span<const Segment> segments) {
    std::vector<Row> decode;
    for (const Segment& segment : segments) {
      std::vector<Row> rows;
      for (int64_t position = segment.begin; position < segment.begin + segment.count; ++position) {
        const int32_t page = segment.pages[static_cast<size_t>(position / kPageTokens)];
        work_.slots.push_back(static_cast<int32_t>(page * kPageTokens + position % kPageTokens));
        rows.push_back({num_tokens_++, static_cast<int32_t>(position + 1),
                        segment.pages.first(static_cast<size_t>(pages_for(position + 1)))});
      }
      if (segment.count == 1) decode.push_back(rows[0]);
      else add_pieces(rows, 0, static_cast<int64_t>(rows.back().pages.size()));
    }
    std::stable_sort(decode.begin(), decode.end(), [](const Row& a, const Row& b) {
      return std::lexicographical_compare(a.pages.begin(), a.pages.end(), b.pages.begin(), b.pages.end());
    });
    share(decode, 0, 0);
  }

  AttentionWork finish() {
    int64_t num_pages = 0;
    for (const Piece& piece : pieces_) num_pages += piece.page_end - piece.page_begin;
    const int64_t items = std::max<int64_t>(1, kWantedBlocks / num_groups_);
    for (const Piece& piece : pieces_) {
      const int64_t fragments =
          (static_cast<int64_t>(piece.rows.size()) * heads_ + kPagedSmallEntries - 1) / kPagedSmallEntries;
      add_items(piece, std::max(kLeastPages * fragments, (num_pages + items - 1) / items));
    }
    add_merges();
    for (auto* list : {&work_.large, &work_.small})
      std::stable_sort(list->begin(), list->end(), [](const PagedItem& a, const PagedItem& b) {
        return a.key_end - a.first_key > b.key_end - b.first_key;
      });
    return std::move(work_);
  }

 private:
  // Rows in order of their tables, equal below page `agreed`; `from`: their first page that no piece has yet.
  void share(std::span<const Row> rows, int64_t from, int64_t agreed) {
    if (rows.empty()) return;
    const auto size_of = [](const Row& row) { return static_cast<int64_t>(row.pages.size()); };
    const auto first = rows.front().pages, last = rows.back().pages;
    if (rows.size() == 1) return add_pieces(rows, from, size_of(rows[0]));
    int64_t common = agreed;
    while (common < std::min(size_of(rows.front()), size_of(rows.back())) &&
           first[static_cast<size_t>(common)] == last[static_cast<size_t>(common)])
      ++common;
    const auto num_rows = static_cast<int64_t>(rows.size());
    if ((num_rows - 1) * (common - from) > kPagesOfAPart * num_rows) {
      add_pieces(rows, from, common);
      from = common;
    }
    for (size_t begin = 0; begin < rows.size();) {
      if (size_of(rows[begin]) == common) {  // ends here; those that go on come after it
        if (from < common) add_pieces(rows.subspan(begin, 1), from, common);
        ++begin;
        continue;
      }
      const int32_t page = rows[begin].pages[static_cast<size_t>(common)];
      size_t end = begin + 1;
      while (end < rows.size() && rows[end].pages[static_cast<size_t>(common)] == page) ++end;
      share(rows.subspan(begin, end - begin), from, common);
      begin = end;
    }
  }

  void add_pieces(std::span<const Row> rows, int64_t page_begin, int64_t page_end) {
    for (size_t begin = 0; begin < rows.size(); begin += static_cast<size_t>(max_rows_)) {
      const auto part = rows.subspan(begin, std::min(static_cast<size_t>(max_rows_), rows.size() - begin));
      int64_t end = 0;  // of a prefill's rows the later see more pages
      for (const Row& row : part) end = std::max(end, static_cast<int64_t>(row.pages.size()));
      pieces_.push_back({{part.begin(), part.end()}, page_begin, std::min(page_end, end)});
    }
  }

  // Cuts into equal items of at most `most` pages, of whole tiles.
  void add_items(const Piece& piece, int64_t most) {
    const int64_t num_pages = piece.page_end - piece.page_begin, cuts = (num_pages + most - 1) / most;
    const int64_t tiles = (num_pages + cuts * kTilePages - 1) / (cuts * kTilePages);
    // The last row has the most pages.
    const auto table = piece.rows.back().pages;
    const auto page_offset = static_cast<int64_t>(work_.pages.size());
    work_.pages.insert(work_.pages.end(), table.begin() + piece.page_begin, table.begin() + piece.page_end);
    for (int64_t begin = piece.page_begin; begin < piece.page_end; begin += tiles * kTilePages) {
      const int64_t end = std::min(begin + tiles * kTilePages, piece.page_end);
      int32_t least = INT32_MAX, largest = 0;
      PagedItem item;
      item.row_begin = static_cast<int32_t>(work_.rows.size());
      for (const Row& row : piece.rows) {
        if (row.limit <= begin * kPageTokens) continue;  // of a prefill: sees none of these keys
        least = std::min(least, row.limit);
        largest = std::max(largest, row.limit);
        work_.rows.push_back({.token = row.token, .limit = row.limit});
        first_keys_.push_back(static_cast<int32_t>(begin * kPageTokens));
      }
      item.num_rows = static_cast<int32_t>(work_.rows.size()) - item.row_begin;
      item.page_begin = static_cast<int32_t>(page_offset + begin - piece.page_begin);
      item.first_key = static_cast<int32_t>(begin * kPageTokens);
      item.key_end = std::min(largest, static_cast<int32_t>(end * kPageTokens));
      item.min_limit = std::min(least, item.key_end);
      (item.num_rows * heads_ <= kPagedSmallEntries ? work_.small : work_.large).push_back(item);
    }
  }

  // Rows of several items get parts, numbered in the order of their keys.
  void add_merges() {
    std::vector<int32_t> order(work_.rows.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    const auto token_of = [&](int32_t row) { return work_.rows[static_cast<size_t>(row)].token; };
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return token_of(a) != token_of(b)
                 ? token_of(a) < token_of(b)
                 : first_keys_[static_cast<size_t>(a)] < first_keys_[static_cast<size_t>(b)];
    });
    for (size_t begin = 0, end = 0; begin < order.size(); begin = end) {
      while (end < order.size() && token_of(order[end]) == token_of(order[begin])) ++end;
      if (end - begin == 1) continue;
      const auto part = static_cast<int32_t>(work_.num_parts);
      for (size_t i = begin; i < end; ++i)
        work_.rows[static_cast<size_t>(order[i])].part = static_cast<int32_t>(work_.num_parts++);
      work_.merges.push_back({.token = token_of(order[begin]),
                              .part_begin = part,
                              .part_end = static_cast<int32_t>(work_.num_parts)});
    }
  }

  int64_t heads_, num_groups_, max_rows_;
  int32_t num_tokens_ = 0;
  std::vector<Piece> pieces_;
  std::vector<int32_t> first_keys_;  // of the items of work_.rows
  AttentionWork work_;
};

template <class Record>
void put(int32_t* to, const std::vector<Record>& records) {
  if (!records.empty()) std::memcpy(to, records.data(), records.size() * sizeof(Record));
}

}  // namespace

PagedLayout AttentionWork::layout() const {
  const auto size = [](const auto& list) { return static_cast<int64_t>(list.size()); };
  return {size(large), size(small), size(rows), size(merges), size(slots)};
}

bool AttentionWork::fits(const PagedLayout& capacities) const {
  const PagedLayout needed = layout();
  return needed.max_large <= capacities.max_large && needed.max_small <= capacities.max_small &&
         needed.max_rows <= capacities.max_rows && needed.max_merges <= capacities.max_merges &&
         needed.max_tokens <= capacities.max_tokens;
}

void AttentionWork::write(int32_t* to, const PagedLayout& layout) const {
  BOUGH_CHECK(fits(layout), "attention of ", slots.size(), " tokens does not fit its place");
  const std::vector<PagedHeader> header = {{.num_large = static_cast<int32_t>(large.size()),
                                            .num_small = static_cast<int32_t>(small.size()),
                                            .num_merges = static_cast<int32_t>(merges.size())}};
  put(to, header);
  put(to + layout.large(), large);
  put(to + layout.small(), small);
  put(to + layout.rows(), rows);
  put(to + layout.merges(), merges);
  put(to + layout.slots(), slots);
  std::fill(to + layout.slots() + static_cast<int64_t>(slots.size()), to + layout.pages(), -1);
  put(to + layout.pages(), pages);
}

AttentionWork plan_attention_work(std::span<const Segment> segments, int64_t num_heads, int64_t num_groups) {
  Planner planner(num_heads, num_groups);
  planner.add_segments(segments);
  return planner.finish();
}

}  // namespace bough
