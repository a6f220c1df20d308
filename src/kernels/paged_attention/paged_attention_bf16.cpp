// Paged attention in bf16. An entry is one query token and one query head. Up to 16 entries go through a run
// of pages (AttentionRun) together, one batch of pages at a time:
//
//   S = Q·Kᵀ of every page of the batch;  P = 2^(scale·S - max), page by page;  O += P·V, page by page
//
// An entry is one matrix row of Q, S, P and O (paged_attention_products.h). Its products and sums do not
// depend on the other rows. Its maximum is raised, and its sum and output rescaled, only at a page with a
// score more than kSlack above the maximum. This rule depends only on the entry and the page, so the result
// does not depend on the batches, the other entries or the borders of runs. Weights may reach 2^kSlack, which
// costs no precision and avoids nearly all rescaling.
#include <immintrin.h>

#include <cstring>

#include "kernels/common/exp2_avx.h"
#include "kernels/matrix_product/bf16_products.h"
#include "kernels/paged_attention/paged_attention_products.h"
#include "kernels/paged_attention/paged_attention_task.h"

namespace bough::bf16 {

namespace {
using Element = BFloat16Bits;
using Layer = LayerView<Element, float>;
constexpr int64_t kRows = kEntriesTogether;
constexpr int64_t kPage = kPageTokens;
constexpr int64_t kBatch = kMostPages;  // pages; their scores stay in the cache
constexpr int64_t kAhead = 8;           // pages between the page being computed and the page being prefetched
using Ahead = UpcomingPages<Element, float>;
constexpr float kSlack = 8;  // exponent of 2
constexpr double kLog2E = 1.4426950408889634;

// Entries [first, first + count) of a task during one run.
struct Block {
  const Layer& layer;
  const TaskView<float>& task;
  const AttentionRun& run;
  int64_t first, count;
  const Element* q;  // [count][padded H]
  float* o;          // [count][padded H]
};

// The pages of a run that are computed together (keys, values), and the later pages to prefetch meanwhile.
struct Batch {
  int64_t count;
  const Element* keys[kBatch];
  const Element* values[kBatch];
  const Element* keys_ahead[kBatch];
  const Element* values_ahead[kBatch];
};

void find_pages(const Block& block, int64_t page, int64_t count, Ahead* ahead, Batch& batch) {
  const auto& layer = block.layer;
  batch.count = count;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t offset = layer.offset(block.task.page(block.run, page + i), block.task.g);
    const int64_t offset_ahead = ahead ? ahead->next().offset : offset;
    batch.keys[i] = layer.keys + offset;
    batch.values[i] = layer.values + offset;
    batch.keys_ahead[i] = layer.keys + offset_ahead;
    batch.values_ahead[i] = layer.values + offset_ahead;
  }
}

void add_values(const Block& block, const Batch& batch, int64_t begin, int64_t end, const Element* weights) {
  if (begin == end) return;
  const PageFactors values{batch.values + begin, batch.values_ahead + begin, end - begin};
  const auto add = has_amx() ? amx::add_values : dots::add_values;
  add(block.o, block.count, block.layer.padded_H, weights + begin * kRows * kPage, values);
}

// Raises one entry's maximum to the largest visible score, and rescales the entry's sum and output.
void raise_maximum(const Block& block, int64_t entry, __m512 scores, __mmask16 visible) {
  float& maximum = block.task.maximum[block.first + entry];
  const float raised = _mm512_mask_reduce_max_ps(visible, scores);
  const __m512 factor = exp2_lanes(_mm512_set1_ps(maximum - raised));
  maximum = raised;
  float* sum = block.task.sum + (block.first + entry) * kPage;
  _mm512_storeu_ps(sum, _mm512_mul_ps(_mm512_loadu_ps(sum), factor));
  float* o = block.o + entry * block.layer.padded_H;
  for (int64_t h = 0; h < block.layer.padded_H; h += 16)
    _mm512_storeu_ps(o + h, _mm512_mul_ps(_mm512_loadu_ps(o + h), factor));
}

void run_block(const Block& block, Ahead* ahead, float* scores, Element* weights, float scale) {
  const __m512 factor = _mm512_set1_ps(scale), slack = _mm512_set1_ps(kSlack);
  const auto seen_by = [&](int64_t entry, int64_t page) -> __mmask16 {
    return block.task.visible(block.task.rows[(block.first + entry) / block.layer.heads()], page);
  };
  // The lanes (keys) of the run's last page that each entry sees. An entry without masks sees all lanes of
  // earlier pages.
  __mmask16 seen_of_last[kRows];
  for (int64_t entry = 0; entry < block.count; ++entry)
    seen_of_last[entry] = seen_by(entry, block.run.page_end - 1);
  Batch batch;
  for (int64_t page = block.run.page_begin; page < block.run.page_end; page += batch.count) {
    const int64_t left = block.run.page_end - page;
    find_pages(block, page, left < kBatch ? left : kBatch, ahead, batch);
    const auto multiply = has_amx() ? amx::multiply_keys : dots::multiply_keys;
    multiply(scores, block.q, block.count, block.layer.padded_H, {batch.keys, batch.keys_ahead, batch.count});
    int64_t added = 0;  // pages of the batch that are already added to the outputs
    for (int64_t i = 0; i < batch.count; ++i) {
      const bool is_last = page + i + 1 == block.run.page_end;
      for (int64_t entry = 0; entry < block.count; ++entry) {
        const int64_t at = (i * kRows + entry) * kPage;
        const __mmask16 visible = is_last            ? seen_of_last[entry]
                                  : block.task.masks ? seen_by(entry, page + i)
                                                     : ~__mmask16{0};
        const float* maximum = block.task.maximum + block.first + entry;
        const __m512 score = _mm512_mul_ps(_mm512_load_ps(scores + at), factor);
        __m512 above = _mm512_sub_ps(score, _mm512_set1_ps(*maximum));
        if (_mm512_mask_cmp_ps_mask(visible, above, slack, _CMP_GT_OQ)) {
          add_values(block, batch, added, i, weights);
          added = i;
          raise_maximum(block, entry, score, visible);
          above = _mm512_sub_ps(score, _mm512_set1_ps(*maximum));
        }
        const __m512 weight = _mm512_maskz_mov_ps(visible, exp2_lanes(above));
        float* sum = block.task.sum + (block.first + entry) * kPage;
        _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_loadu_ps(sum), weight));
        _mm256_store_si256(reinterpret_cast<__m256i*>(weights + at),
                           reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(weight)));
      }
    }
    add_values(block, batch, added, batch.count, weights);
  }
}

void begin_entry(const Layer& layer, const TaskView<float>& task, int64_t entry, Element* q) {
  const int64_t heads = layer.heads(), H = layer.H, padded_H = layer.padded_H;
  std::memcpy(q + entry * padded_H,
              layer.q + task.rows[entry / heads].token * layer.q_stride_t +
                  (task.g * heads + entry % heads) * layer.q_stride_n,
              static_cast<size_t>(H) * sizeof(Element));
  std::memset(q + entry * padded_H + H, 0, static_cast<size_t>(padded_H - H) * sizeof(Element));
  std::memset(task.output + entry * padded_H, 0, static_cast<size_t>(padded_H) * sizeof(float));
  std::memset(task.sum + entry * kPage, 0, kPage * sizeof(float));
  task.maximum[entry] = kLowest;
}

void finish_entry(const Layer& layer, const TaskView<float>& task, int64_t entry) {
  const int64_t heads = layer.heads();
  const float sum = _mm512_reduce_add_ps(_mm512_loadu_ps(task.sum + entry * kPage));
  const int64_t row = task.rows[entry / heads].token * layer.N + task.g * heads + entry % heads;
  if (layer.lse) layer.lse[row] = (task.maximum[entry] + __builtin_log2f(sum)) * kLn2;
  const __m512 inverse = _mm512_set1_ps(1.0f / sum);
  const float* output = task.output + entry * layer.padded_H;
  Element* o = layer.o + row * layer.H;
  for (int64_t h = 0; h < layer.H; h += 16) {
    const int64_t left = layer.H - h;
    const __mmask16 lanes = left >= 16 ? ~__mmask16{0} : static_cast<__mmask16>((1u << left) - 1);
    const auto rounded =
        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(output + h), inverse)));
    _mm256_mask_storeu_epi16(o + h, lanes, rounded);
  }
}
}  // namespace

void run_attention_task(const Layer& layer, const TaskView<float>& task) {
  alignas(64) float scores[kBatch * kRows * kPage];
  alignas(64) Element weights[kBatch * kRows * kPage];
  const int64_t heads = layer.heads(), entries = task.num_rows * heads;
  const auto scale = static_cast<float>(layer.scale * kLog2E);
  auto* q = reinterpret_cast<Element*>(task.q);
  for (int64_t entry = 0; entry < entries; ++entry) begin_entry(layer, task, entry, q);
  Ahead ahead(layer, task, kAhead);
  int64_t configured = 0;
  for (int64_t r = 0; r < task.num_runs; ++r) {
    const AttentionRun& run = task.runs[r];
    for (int64_t first = run.row_begin * heads, count; first < run.row_end * heads; first += count) {
      count = run.row_end * heads - first < kRows ? run.row_end * heads - first : kRows;
      if (count != configured && has_amx()) amx::begin_rows(count);
      configured = count;
      // Only a run's first 16 entries prefetch pages. Later entries find the run's pages in the cache.
      run_block(
          {layer, task, run, first, count, q + first * layer.padded_H, task.output + first * layer.padded_H},
          first == run.row_begin * heads ? &ahead : nullptr, scores, weights, scale);
    }
  }
  for (int64_t entry = 0; entry < entries; ++entry) finish_entry(layer, task, entry);
}

}  // namespace bough::bf16
