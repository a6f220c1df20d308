#include "rollout/paged_attention.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "base/error.h"

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

PagedAttention::PagedAttention(KvStorage& storage, std::vector<Segment> segments, AttentionPath path)
    : storage_(storage), segments_(std::move(segments)), path_(path) {
  int64_t num_decode = 0;
  for (const Segment& segment : segments_) {
    BOUGH_CHECK(segment.count > 0 && segment.begin >= 0, "segment of ", segment.count, " tokens at ",
                segment.begin);
    BOUGH_CHECK(pages_for(segment.begin + segment.count) <= static_cast<int64_t>(segment.pages.size()),
                "position ", segment.begin + segment.count - 1, " lies beyond ", segment.pages.size(),
                " pages");
    for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i) {
      slots_.push_back(segment.pages[static_cast<size_t>(i / kPageTokens)] * kPageTokens + i % kPageTokens);
    }
    num_tokens_ += segment.count;
    num_decode += segment.count == 1;
  }
  if (path_ == AttentionPath::kFastest && storage_.keys(0).is_cpu()) {
    // Four tasks a thread even out; 32 rows read a page often enough to hide its loading.
    const int64_t tasks_wanted = 4 * at::get_num_threads();
    const int64_t max_rows = num_decode * storage_.num_kv_heads() / std::max<int64_t>(1, tasks_wanted);
    schedule_ = schedule_attention(segments_, std::clamp<int64_t>(max_rows, 4, 32));
  }
}

void PagedAttention::check_shapes(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                                  const at::Tensor& v_TGH) const {
  const int64_t G = storage_.num_kv_heads(), H = storage_.head_dim();
  BOUGH_CHECK(layer >= 0 && layer < storage_.num_layers(), "layer ", layer, " of ", storage_.num_layers());
  BOUGH_CHECK(
      q_TNH.dim() == 3 && q_TNH.size(0) == num_tokens_ && q_TNH.size(1) % G == 0 && q_TNH.size(2) == H,
      "q is ", q_TNH.sizes(), ", expected [", num_tokens_, ", multiple of ", G, ", ", H, "]");
  for (const at::Tensor* x : {&k_TGH, &v_TGH}) {
    BOUGH_CHECK(x->dim() == 3 && x->size(0) == num_tokens_ && x->size(1) == G && x->size(2) == H,
                "k or v is ", x->sizes(), ", expected [", num_tokens_, ", ", G, ", ", H, "]");
  }
  for (const at::Tensor* x : {&q_TNH, &k_TGH, &v_TGH}) {
    BOUGH_CHECK(x->stride(2) == 1 && x->scalar_type() == storage_.keys(0).scalar_type() &&
                    x->device() == storage_.keys(0).device(),
                "q, k, v: expected ", storage_.keys(0).scalar_type(), " on ", storage_.keys(0).device().str(),
                " with contiguous heads, got ", x->scalar_type(), " on ", x->device().str(), ", strides ",
                x->strides());
  }
}

at::Tensor PagedAttention::attend(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                                  const at::Tensor& v_TGH) {
  check_shapes(layer, q_TNH, k_TGH, v_TGH);
  if (path_ == AttentionPath::kFastest && q_TNH.is_cpu()) return attend_cpu(layer, q_TNH, k_TGH, v_TGH);
  return attend_reference(layer, q_TNH, k_TGH, v_TGH);
}

}  // namespace bough
