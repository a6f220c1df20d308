#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>

#include "base/error.h"
#include "kernels/paged_attention/paged_plan.h"

namespace bough {

namespace {

static_assert(kPagedPageTokens == kPageTokens);

// Wanted CUDA thread blocks per launch: several for each multiprocessor of the largest GPUs. The number is
// constant, so that results are the same on all GPUs.
constexpr int64_t kWantedBlocks = 1024;
constexpr int64_t kTilePages = 4;  // pages that a thread block reads at once
// A piece is not cut if it has at most this many pages per fragment of 16 query vectors. The parts that items
// write are then at most about a quarter of the data that the items read.
constexpr int64_t kLeastPages = 2 * kTilePages;
// One item for p pages and r rows saves (r - 1) p page reads. Writing and reading a part of one row costs
// about two page reads.
constexpr int64_t kPagesOfAPart = 2;

struct Row {
  int32_t token, limit;  // limit: the row sees the keys below it
  std::span<const int32_t> pages;
};
struct Piece {  // rows that attend to pages [page_begin, page_end) of the first row's list
  std::vector<Row> rows;
  int64_t page_begin, page_end;
  int32_t group;  // key/value head, or -1 for all
};

// Returns the number of leading pages that two lists have in common, at least `agreed`, which the caller
// knows. Lists of long sequences have hundreds of common pages, which memcmp compares faster than a loop.
int64_t common_pages(std::span<const int32_t> a, std::span<const int32_t> b, int64_t agreed) {
  constexpr int64_t kBlock = 32;
  const auto size = static_cast<int64_t>(std::min(a.size(), b.size()));
  int64_t common = agreed;
  while (common + kBlock <= size &&
         std::memcmp(a.data() + common, b.data() + common, kBlock * sizeof(int32_t)) == 0)
    common += kBlock;
  while (common < size && a[static_cast<size_t>(common)] == b[static_cast<size_t>(common)]) ++common;
  return common;
}

class Planner {
 public:
  Planner(int64_t num_heads, int64_t num_groups)
      : heads_(num_heads / num_groups),
        num_groups_(num_groups),
        max_rows_(std::max<int64_t>(1, kPagedLargeEntries / heads_)) {}

  // Adds all segments with the page lists of key/value head `group`, or of all heads if `group` is -1.
  void add_segments(std::span<const PagedSegment> segments, const PageSelection* selection, size_t lists,
                    int32_t group) {
    group_ = group;
    work_.per_head = group >= 0;
    std::vector<Row> decode;
    int32_t token = 0;
    for (size_t s = 0; s < segments.size(); ++s) {
      const PagedSegment& segment = segments[s];
      const size_t list = s * lists + static_cast<size_t>(std::max(group, 0));
      const PageList pages(segment, selection ? &selection->lists[list] : nullptr);
      std::span<const int32_t> ids = segment.pages;
      if (selection) {
        auto& selected = selected_.emplace_back();
        for (int64_t i = 0; i < pages.size(); ++i) selected.push_back(pages.page(i));
        ids = selected;
      }
      std::vector<Row> rows;
      for (int64_t position = segment.begin; position < segment.begin + segment.count; ++position) {
        if (group <= 0) work_.slots.push_back(pages.slot(position));
        const int64_t limit = pages.keys_below(position + 1);
        rows.push_back(
            {token++, static_cast<int32_t>(limit), ids.first(static_cast<size_t>(pages_for(limit)))});
      }
      if (segment.count == 1) decode.push_back(rows[0]);
      else add_pieces(rows, 0, static_cast<int64_t>(rows.back().pages.size()));
    }
    share(decode, 0, 0);
  }

  PagedWork finish() {
    int64_t num_pages = 0;
    for (const Piece& piece : pieces_) num_pages += piece.page_end - piece.page_begin;
    work_.pages.reserve(static_cast<size_t>(num_pages));
    const int64_t items = std::max<int64_t>(1, work_.per_head ? kWantedBlocks : kWantedBlocks / num_groups_);
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
  // Divides decode rows into pieces. The rows have the same first `agreed` pages. `from` is the rows' first
  // page that no piece has yet. Sorts the rows by their page lists.
  void share(std::span<Row> rows, int64_t from, int64_t agreed) {
    if (rows.empty()) return;
    const auto size_of = [](const Row& row) { return static_cast<int64_t>(row.pages.size()); };
    if (rows.size() == 1) return add_pieces(rows, from, size_of(rows[0]));
    int64_t common = size_of(rows[0]);
    for (const Row& row : rows.subspan(1))
      common =
          std::min(common, common_pages(rows[0].pages.first(static_cast<size_t>(common)), row.pages, agreed));
    // Returns a row's page after the common pages, or -1 if there is none, so that such rows come first.
    const auto next_page = [&](const Row& row) {
      return size_of(row) == common ? -1 : row.pages[static_cast<size_t>(common)];
    };
    std::stable_sort(rows.begin(), rows.end(),
                     [&](const Row& a, const Row& b) { return next_page(a) < next_page(b); });
    const auto num_rows = static_cast<int64_t>(rows.size());
    if ((num_rows - 1) * (common - from) > kPagesOfAPart * num_rows) {
      add_pieces(rows, from, common);
      from = common;
    }
    for (size_t begin = 0; begin < rows.size();) {
      if (size_of(rows[begin]) == common) {
        if (from < common) add_pieces(rows.subspan(begin, 1), from, common);
        ++begin;
        continue;
      }
      size_t end = begin + 1;
      while (end < rows.size() && next_page(rows[end]) == next_page(rows[begin])) ++end;
      share(rows.subspan(begin, end - begin), from, common);
      begin = end;
    }
  }

  void add_pieces(std::span<const Row> rows, int64_t page_begin, int64_t page_end) {
    for (size_t begin = 0; begin < rows.size(); begin += static_cast<size_t>(max_rows_)) {
      const auto part = rows.subspan(begin, std::min(static_cast<size_t>(max_rows_), rows.size() - begin));
      int64_t end = 0;  // in a prefill, later rows see more pages
      for (const Row& row : part) end = std::max(end, static_cast<int64_t>(row.pages.size()));
      pieces_.push_back({{part.begin(), part.end()}, page_begin, std::min(page_end, end), group_});
    }
  }

  // Cuts a piece into equal items of at most `most` pages. Every item except the last has whole tiles.
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
        if (row.limit <= begin * kPageTokens) continue;  // a prefill row that sees none of these keys
        least = std::min(least, row.limit);
        largest = std::max(largest, row.limit);
        work_.rows.push_back({.token = row.token, .limit = row.limit});
        groups_.push_back(piece.group);
      }
      item.num_rows = static_cast<int32_t>(work_.rows.size()) - item.row_begin;
      item.page_begin = static_cast<int32_t>(page_offset + begin - piece.page_begin);
      item.first_key = static_cast<int32_t>(begin * kPageTokens);
      item.key_end = std::min(largest, static_cast<int32_t>(end * kPageTokens));
      item.min_limit = std::min(least, item.key_end);
      item.group = piece.group;
      (item.num_rows * heads_ <= kPagedSmallEntries ? work_.small : work_.large).push_back(item);
    }
  }

  // Rows in several items get parts. A row's parts are numbered in the order of their keys, because pieces
  // were found and items were added in this order.
  void add_merges() {
    const int64_t lists = work_.per_head ? num_groups_ : 1;
    const auto owner_of = [&](size_t row) {
      return static_cast<size_t>(work_.rows[row].token * lists + std::max(groups_[row], 0));
    };
    std::vector<int32_t> begin_of(work_.slots.size() * static_cast<size_t>(lists) + 1);  // for each owner
    for (size_t i = 0; i < work_.rows.size(); ++i) ++begin_of[owner_of(i) + 1];
    std::partial_sum(begin_of.begin(), begin_of.end(), begin_of.begin());
    std::vector<int32_t> order(work_.rows.size()), next = begin_of;
    for (size_t i = 0; i < order.size(); ++i)
      order[static_cast<size_t>(next[owner_of(i)]++)] = static_cast<int32_t>(i);
    for (size_t owner = 0; owner + 1 < begin_of.size(); ++owner) {
      const std::span own(order.begin() + begin_of[owner], order.begin() + begin_of[owner + 1]);
      if (own.size() < 2) continue;
      const auto part = static_cast<int32_t>(work_.num_parts);
      for (const int32_t row : own)
        work_.rows[static_cast<size_t>(row)].part = static_cast<int32_t>(work_.num_parts++);
      const auto first = static_cast<size_t>(own[0]);
      work_.merges.push_back({.token = work_.rows[first].token,
                              .part_begin = part,
                              .part_end = static_cast<int32_t>(work_.num_parts),
                              .group = groups_[first]});
    }
  }

  int64_t heads_, num_groups_, max_rows_;
  int32_t group_ = -1;                         // key/value head whose lists are being added; -1: all
  std::deque<std::vector<int32_t>> selected_;  // page lists of rows
  std::vector<Piece> pieces_;
  std::vector<int32_t> groups_;  // Piece::group of each row of work_.rows
  PagedWork work_;
};

template <class Record>
void put(int32_t* to, const std::vector<Record>& records) {
  if (!records.empty()) std::memcpy(to, records.data(), records.size() * sizeof(Record));
}

}  // namespace

PagedLayout PagedWork::layout() const {
  const auto size = [](const auto& list) { return static_cast<int64_t>(list.size()); };
  return {size(large), size(small), size(rows), size(merges), size(slots), per_head};
}

bool PagedWork::fits(const PagedLayout& capacities) const {
  const PagedLayout needed = layout();
  return needed.max_large <= capacities.max_large && needed.max_small <= capacities.max_small &&
         needed.max_rows <= capacities.max_rows && needed.max_merges <= capacities.max_merges &&
         needed.max_tokens <= capacities.max_tokens && per_head == capacities.per_head;
}

void PagedWork::write(int32_t* to, const PagedLayout& layout) const {
  BOUGH_CHECK(fits(layout), "attention of ", slots.size(),
              " tokens does not fit into the capacities of the layout");
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

PagedWork plan_paged_work(std::span<const PagedSegment> segments, int64_t num_heads, int64_t num_kv_heads,
                          const PageSelection* selection) {
  BOUGH_CHECK(!selection || selection->masks.empty(), "CUDA attends to whole pages");
  const bool per_head = selection && selection->per_head;
  const size_t lists = per_head ? static_cast<size_t>(num_kv_heads) : 1;
  BOUGH_CHECK(!selection || selection->lists.size() == segments.size() * lists, "a selection of ",
              selection ? selection->lists.size() : 0, " lists for ", segments.size(), " segments, ",
              num_kv_heads, " heads");
  Planner planner(num_heads, num_kv_heads);
  if (!per_head) planner.add_segments(segments, selection, 1, -1);
  else
    for (size_t g = 0; g < lists; ++g)
      planner.add_segments(segments, selection, lists, static_cast<int32_t>(g));
  return planner.finish();
}

OpenPagedWork plan_open_paged_work(std::span<const PagedSegment> segments, std::span<const OpenSegment> open,
                                   int64_t num_heads, int64_t num_kv_heads) {
  // Stands for the page ids of table i · G + g. Below -1, which the planner uses itself.
  const auto placeholder = [&](size_t i, int64_t g) {
    return static_cast<int32_t>(-2 - static_cast<int64_t>(i) * num_kv_heads - g);
  };
  std::deque<std::vector<int32_t>> pages;  // to which the planner keeps references
  Planner planner(num_heads, num_kv_heads);
  for (int64_t g = 0; g < num_kv_heads; ++g) {
    std::vector<PagedSegment> of_head(segments.begin(), segments.end());
    for (size_t i = 0; i < open.size(); ++i) {
      PagedSegment& segment = of_head.at(open[i].segment);
      BOUGH_CHECK(segment.count == 1 && open[i].num_pages > 0, "an open segment has ", segment.count,
                  " tokens and ", open[i].num_pages, " pages; expected one token, and pages");
      segment = {.pages = pages.emplace_back(static_cast<size_t>(open[i].num_pages), placeholder(i, g)),
                 .begin = (open[i].num_pages - 1) * kPageTokens + segment.begin % kPageTokens,
                 .count = 1};
    }
    planner.add_segments(of_head, nullptr, 1, static_cast<int32_t>(g));
  }
  OpenPagedWork planned{planner.finish(),
                        std::vector<int32_t>(open.size() * static_cast<size_t>(num_kv_heads), -1)};
  std::ranges::fill(planned.work.slots, -1);
  std::vector<int32_t>& ids = planned.work.pages;
  for (size_t at = 0; at < ids.size(); ++at) {
    if (ids[at] >= 0) continue;
    int32_t& table = planned.tables.at(static_cast<size_t>(-2 - ids[at]));
    if (table < 0) table = static_cast<int32_t>(at);
    ids[at] = 0;
  }
  return planned;
}

}  // namespace bough
