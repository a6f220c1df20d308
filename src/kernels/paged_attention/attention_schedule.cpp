#include "kernels/paged_attention/attention_schedule.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace bough {

namespace {

// Rows [begin, end) of the task that starts at row `origin` agree on pages below `page` and are sorted by
// their tables. Emits the runs of what follows; recursion is at most as deep as there are rows.
void emit_runs(AttentionSchedule& schedule, int32_t origin, int32_t begin, int32_t end, int64_t page) {
  const auto& rows = schedule.rows;
  while (begin < end && rows[static_cast<size_t>(begin)].num_pages == page) ++begin;  // these are done
  if (begin == end) return;
  const AttentionRow& first = rows[static_cast<size_t>(begin)];
  const AttentionRow& last = rows[static_cast<size_t>(end - 1)];
  int64_t common = page;
  while (common < first.num_pages && common < last.num_pages && first.pages[common] == last.pages[common])
    ++common;
  if (common > page) {
    schedule.runs.push_back({begin - origin, end - origin, static_cast<int32_t>(page),
                             static_cast<int32_t>(common), first.pages});
    emit_runs(schedule, origin, begin, end, common);
    return;
  }
  for (int32_t next = begin; begin < end; begin = next) {
    const int32_t id = rows[static_cast<size_t>(begin)].pages[page];
    while (next < end && rows[static_cast<size_t>(next)].pages[page] == id) ++next;
    emit_runs(schedule, origin, begin, next, page);
  }
}

void add_task(AttentionSchedule& schedule, size_t row_begin, bool decodes) {
  AttentionTask task;
  task.decodes = decodes;
  task.row_begin = static_cast<int32_t>(row_begin);
  task.row_end = static_cast<int32_t>(schedule.rows.size());
  task.run_begin = static_cast<int32_t>(schedule.runs.size());
  emit_runs(schedule, task.row_begin, task.row_begin, task.row_end, 0);
  task.run_end = static_cast<int32_t>(schedule.runs.size());
  schedule.tasks.push_back(task);
}

}  // namespace

AttentionSchedule schedule_attention(std::span<const Segment> segments, int64_t max_rows) {
  AttentionSchedule schedule;
  std::vector<AttentionRow> decode;
  int64_t token = 0;
  for (const Segment& segment : segments) {
    // Blocks of a prefill end at page borders, so that all rows of a task see some of every page they visit.
    for (int64_t position = segment.begin; position < segment.begin + segment.count;) {
      const int64_t border = (position / kPageTokens + 1) * kPageTokens;
      const int64_t end = std::min(segment.begin + segment.count, border);
      const int64_t num_pages = pages_for(end);
      if (segment.count == 1) {
        decode.push_back({token++, end, segment.pages.data(), num_pages});
        position = end;
        continue;
      }
      const size_t row_begin = schedule.rows.size();
      for (; position < end; ++position)
        schedule.rows.push_back({token++, position + 1, segment.pages.data(), num_pages});
      add_task(schedule, row_begin, false);
    }
  }
  // Sequences that share pages become neighbours.
  std::stable_sort(decode.begin(), decode.end(), [](const AttentionRow& a, const AttentionRow& b) {
    return std::lexicographical_compare(a.pages, a.pages + a.num_pages, b.pages, b.pages + b.num_pages);
  });
  for (size_t begin = 0; begin < decode.size(); begin += static_cast<size_t>(max_rows)) {
    const size_t end = std::min(decode.size(), begin + static_cast<size_t>(max_rows));
    const size_t row_begin = schedule.rows.size();
    schedule.rows.insert(schedule.rows.end(), decode.begin() + static_cast<int64_t>(begin),
                         decode.begin() + static_cast<int64_t>(end));
    add_task(schedule, row_begin, true);
  }
  return schedule;
}

AttentionSchedule schedule_attention_for_threads(std::span<const Segment> segments, int64_t num_kv_heads) {
  int64_t num_decode = 0;
  for (const Segment& segment : segments) num_decode += segment.count == 1;
  // Four tasks a thread even out; 32 rows read a page often enough to hide its loading.
  const int64_t tasks_wanted = 4 * at::get_num_threads();
  const int64_t max_rows = num_decode * num_kv_heads / tasks_wanted;
  return schedule_attention(segments, std::clamp<int64_t>(max_rows, 4, 32));
}

}  // namespace bough
