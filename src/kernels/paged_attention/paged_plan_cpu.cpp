#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "kernels/paged_attention/paged_plan.h"

namespace bough {

PageList::PageList(const PagedSegment& segment, const std::vector<int32_t>* selected)
    : segment_(&segment), selected_(selected) {
  BOUGH_CHECK(segment.count > 0 && segment.begin >= 0, "segment of ", segment.count, " tokens at ",
              segment.begin);
  BOUGH_CHECK(segment.first_keys.empty() || segment.first_keys.size() == segment.pages.size(),
              segment.first_keys.size(), " first keys of ", segment.pages.size(), " pages");
  if (selected)
    for (size_t i = 0; i < selected->size(); ++i)
      BOUGH_CHECK((*selected)[i] >= 0 && (*selected)[i] < static_cast<int64_t>(segment.pages.size()) &&
                      (i == 0 || (*selected)[i] > (*selected)[i - 1]),
                  "selected page ", (*selected)[i], " of ", segment.pages.size(), ", the ", i,
                  "th of the selection");
  if (!segment.first_keys.empty())
    for (int64_t i = 1; i < size(); ++i)
      BOUGH_CHECK(first_key(i) >= first_key(i - 1) + kPageTokens, "page ", i, " begins at key ", first_key(i),
                  ", the one before it at ", first_key(i - 1));
  // The page of each token must be listed. Tokens are consecutive, so one check per page is enough.
  for (int64_t position = segment.begin; position < segment.begin + segment.count;) {
    const int64_t i = (keys_below(position + 1) - 1) / kPageTokens;
    BOUGH_CHECK(size() > 0 && i >= 0 && first_key(i) <= position && position < first_key(i) + kPageTokens,
                "position ", position, " lies in none of ", size(), " pages");
    position = first_key(i) + kPageTokens;
  }
}

int64_t PageList::keys_below(int64_t position) const {
  int64_t begun = 0;  // number of pages that begin below `position`
  if (!selected_ && segment_->first_keys.empty()) {
    begun = std::min(pages_for(position), size());
  } else {
    for (int64_t end = size(); begun < end;) {
      const int64_t middle = (begun + end) / 2;
      if (first_key(middle) < position) begun = middle + 1;
      else end = middle;
    }
  }
  return begun == 0 ? 0 : (begun - 1) * kPageTokens + std::min(kPageTokens, position - first_key(begun - 1));
}

int32_t PageList::slot(int64_t position) const {
  const int64_t key = keys_below(position + 1) - 1;
  return static_cast<int32_t>(page(key / kPageTokens) * kPageTokens + key % kPageTokens);
}

namespace {

class Scheduler {
 public:
  explicit Scheduler(int64_t max_rows) : max_rows_(max_rows) {}

  // Adds all segments with the page lists of key/value head `head`, or of all heads if `head` is -1.
  void add(std::span<const PagedSegment> segments, const PageSelection* selection, size_t lists,
           int32_t head) {
    std::vector<AttentionRow> decode;
    int32_t token = 0;
    for (size_t s = 0; s < segments.size(); ++s) {
      const PagedSegment& segment = segments[s];
      const size_t list = s * lists + static_cast<size_t>(std::max(head, 0));
      const PageList pages(segment, selection ? &selection->lists[list] : nullptr);
      const int64_t end = segment.begin + segment.count;
      const auto pages_at = static_cast<int32_t>(made_.pages.size());
      const int64_t visited = pages_for(pages.keys_below(end));
      for (int64_t i = 0; i < visited; ++i) made_.pages.push_back(pages.page(i));
      if (selection && !selection->masks.empty()) {
        const std::vector<uint16_t>& masks = selection->masks[list];
        BOUGH_CHECK(std::ssize(masks) >= visited, masks.size(), " masks of ", visited, " selected pages");
        made_.masks.insert(made_.masks.end(), masks.begin(), masks.begin() + visited);
      }
      if (head <= 0)
        for (int64_t position = segment.begin; position < end; ++position)
          made_.slots.push_back(pages.slot(position));
      if (segment.count == 1) {
        decode.push_back(
            {token++, static_cast<int32_t>(pages.keys_below(end)), pages_at, static_cast<int32_t>(visited)});
        continue;
      }
      // A prefill is divided into tasks at page borders, so that all rows of a task see a part of every page
      // that the task visits.
      for (int64_t position = segment.begin; position < end;) {
        const size_t row_begin = made_.rows.size();
        const int64_t num_pages = pages_for(pages.keys_below(position + 1));
        for (int64_t seen; position < end; ++position) {
          seen = pages.keys_below(position + 1);
          if (pages_for(seen) != num_pages) break;
          made_.rows.push_back(
              {token++, static_cast<int32_t>(seen), pages_at, static_cast<int32_t>(num_pages)});
        }
        add_task(row_begin, false, head);
      }
    }
    // Sorting places rows whose lists begin with the same pages next to each other.
    std::stable_sort(decode.begin(), decode.end(), [&](const AttentionRow& a, const AttentionRow& b) {
      const int32_t *of_a = made_.pages.data() + a.pages_at, *of_b = made_.pages.data() + b.pages_at;
      return std::lexicographical_compare(of_a, of_a + a.num_pages, of_b, of_b + b.num_pages);
    });
    for (size_t begin = 0; begin < decode.size(); begin += static_cast<size_t>(max_rows_)) {
      const size_t end = std::min(decode.size(), begin + static_cast<size_t>(max_rows_));
      const size_t row_begin = made_.rows.size();
      made_.rows.insert(made_.rows.end(), decode.begin() + static_cast<int64_t>(begin),
                        decode.begin() + static_cast<int64_t>(end));
      add_task(row_begin, true, head);
    }
  }

  PagedSchedule finish() { return std::move(made_); }

 private:
  int32_t page(const AttentionRow& row, int64_t i) const {
    return made_.pages[static_cast<size_t>(row.pages_at + i)];
  }

  // Rows [begin, end) of the task that starts at row `origin` have the same first `at` pages and are sorted
  // by their page lists. Adds the runs for the pages from `at` on. The recursion is at most as deep as the
  // number of rows.
  void emit_runs(int32_t origin, int32_t begin, int32_t end, int32_t at) {
    const auto& rows = made_.rows;
    while (begin < end && rows[static_cast<size_t>(begin)].num_pages == at) ++begin;  // complete
    if (begin == end) return;
    const AttentionRow& first = rows[static_cast<size_t>(begin)];
    const AttentionRow& last = rows[static_cast<size_t>(end - 1)];
    int32_t common = at;
    while (common < first.num_pages && common < last.num_pages && page(first, common) == page(last, common))
      ++common;
    if (common > at) {
      made_.runs.push_back({begin - origin, end - origin, at, common, first.pages_at});
      emit_runs(origin, begin, end, common);
      return;
    }
    for (int32_t next = begin; begin < end; begin = next) {
      const int32_t id = page(rows[static_cast<size_t>(begin)], at);
      while (next < end && page(rows[static_cast<size_t>(next)], at) == id) ++next;
      emit_runs(origin, begin, next, at);
    }
  }

  void add_task(size_t row_begin, bool decodes, int32_t head) {
    AttentionTask task;
    task.decodes = decodes;
    task.head = head;
    task.row_begin = static_cast<int32_t>(row_begin);
    task.row_end = static_cast<int32_t>(made_.rows.size());
    task.run_begin = static_cast<int32_t>(made_.runs.size());
    emit_runs(task.row_begin, task.row_begin, task.row_end, 0);
    task.run_end = static_cast<int32_t>(made_.runs.size());
    made_.tasks.push_back(task);
  }

  int64_t max_rows_;
  PagedSchedule made_;
};

struct ScheduleHeader {
  int32_t num_rows, num_runs, num_tasks, num_tokens, num_pages, num_masks;
};

}  // namespace

PagedSchedule schedule_paged(std::span<const PagedSegment> segments, int64_t num_kv_heads,
                             const PageSelection* selection, int64_t max_rows) {
  const bool per_head = selection && selection->per_head;
  const size_t lists = per_head ? static_cast<size_t>(num_kv_heads) : 1;
  BOUGH_CHECK(!selection || selection->masks.empty() || selection->masks.size() == selection->lists.size(),
              "a selection of ", selection ? selection->lists.size() : 0,
              " lists has another number of masks");
  BOUGH_CHECK(!selection || selection->lists.size() == segments.size() * lists, "a selection of ",
              selection ? selection->lists.size() : 0, " lists for ", segments.size(), " segments, ",
              num_kv_heads, " heads");
  Scheduler scheduler(max_rows);
  if (!per_head) scheduler.add(segments, selection, 1, -1);
  else
    for (size_t g = 0; g < lists; ++g) scheduler.add(segments, selection, lists, static_cast<int32_t>(g));
  return scheduler.finish();
}

PagedSchedule schedule_paged_for_threads(std::span<const PagedSegment> segments, int64_t num_kv_heads,
                                         const PageSelection* selection) {
  int64_t num_decode = 0;
  for (const PagedSegment& segment : segments) num_decode += segment.count == 1;
  // Four tasks per thread balance the threads. 32 rows per page are enough to hide the loading of the page.
  const int64_t tasks_wanted = 4 * at::get_num_threads();
  const int64_t max_rows = num_decode * num_kv_heads / tasks_wanted;
  return schedule_paged(segments, num_kv_heads, selection, std::clamp<int64_t>(max_rows, 4, 32));
}

at::Tensor PagedSchedule::as_tensor() const {
  const ScheduleHeader header{static_cast<int32_t>(rows.size()),  static_cast<int32_t>(runs.size()),
                              static_cast<int32_t>(tasks.size()), static_cast<int32_t>(slots.size()),
                              static_cast<int32_t>(pages.size()), static_cast<int32_t>(masks.size())};
  const size_t bytes = sizeof header + rows.size() * sizeof(AttentionRow) +
                       runs.size() * sizeof(AttentionRun) + tasks.size() * sizeof(AttentionTask) +
                       (slots.size() + pages.size() + masks.size()) * sizeof(int32_t);
  at::Tensor work =
      at::empty({static_cast<int64_t>(bytes / sizeof(int32_t))}, at::TensorOptions().dtype(at::kInt));
  auto* to = static_cast<char*>(work.mutable_data_ptr());
  const auto put = [&](const void* from, size_t size) {
    if (size > 0) std::memcpy(to, from, size);
    to += size;
  };
  put(&header, sizeof header);
  put(rows.data(), rows.size() * sizeof(AttentionRow));
  put(runs.data(), runs.size() * sizeof(AttentionRun));
  put(tasks.data(), tasks.size() * sizeof(AttentionTask));
  put(slots.data(), slots.size() * sizeof(int32_t));
  put(pages.data(), pages.size() * sizeof(int32_t));
  put(masks.data(), masks.size() * sizeof(int32_t));
  return work;
}

ScheduleView::ScheduleView(const at::Tensor& work) {
  constexpr int64_t kHeader = sizeof(ScheduleHeader) / sizeof(int32_t);
  BOUGH_CHECK(
      work.is_cpu() && work.scalar_type() == at::kInt && work.is_contiguous() && work.numel() >= kHeader,
      "paged_attention: work ", work.sizes(), " ", work.scalar_type(), " on ", work.device().str());
  const auto* from = static_cast<const char*>(work.const_data_ptr());
  const auto take = [&]<class T>(std::span<const T>& list, int32_t count) {
    list = {reinterpret_cast<const T*>(from), static_cast<size_t>(count)};
    from += list.size_bytes();
  };
  std::span<const ScheduleHeader> header;
  take(header, 1);
  take(rows, header[0].num_rows);
  take(runs, header[0].num_runs);
  take(tasks, header[0].num_tasks);
  take(slots, header[0].num_tokens);
  pages = reinterpret_cast<const int32_t*>(from);
  const int32_t* const end = pages + header[0].num_pages + header[0].num_masks;
  masks = header[0].num_masks > 0 ? pages + header[0].num_pages : nullptr;
  BOUGH_CHECK(static_cast<const int32_t*>(work.const_data_ptr()) + work.numel() >= end,
              "paged_attention: work of ", work.numel(), " numbers is shorter than its header says");
}

}  // namespace bough
