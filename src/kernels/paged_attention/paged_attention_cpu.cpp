// Loops of paged attention on the CPU, except bf16 on CPUs with AVX512-BF16 (paged_attention_bf16.cpp). An
// entry (one query token and one query head) has a running maximum, a running sum (a vector, reduced at the
// end) and a running output. Four entries go through a page together, so that each load from the page is used
// for four products. An entry's operations and their order do not depend on the other entries.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <optional>

#include "kernels/common/op.h"
#include "kernels/common/scratch.h"
#include "kernels/common/simd.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/matrix_product/matrix_product_tiles.h"
#include "kernels/paged_attention/paged_attention.h"

namespace bough {

namespace {

template <class T>
using Layer = LayerView<T, AccOf<T>>;
using simd::kLanes;
static_assert(kLanes == kPageTokens);
template <class T>
constexpr int64_t kPairSize = sizeof(T) == 2 ? 2 : 1;

// Starting threads costs about 5 microseconds. One thread computes about this many products in that time.
constexpr int64_t kProductsWorthThreads = 200000;

// Loads two vectors from a page. If elements are stored in pairs (pages.h): the first and the second elements
// of as many pairs. Otherwise: a part of two rows.
template <class Vector>
BOUGH_INLINE void load_two(Vector& even, Vector& odd, const BFloat16Bits* pairs, int64_t) {
  typename simd::Like<Vector>::Integers bits;
  std::memcpy(&bits, pairs, sizeof bits);
  const auto low = bits << 16, high = bits & static_cast<int32_t>(0xFFFF0000u);
  std::memcpy(&even, &low, sizeof even);
  std::memcpy(&odd, &high, sizeof odd);
}
template <class Vector, class A>
BOUGH_INLINE void load_two(Vector& even, Vector& odd, const A* rows, int64_t stride) {
  std::memcpy(&even, rows, sizeof even);
  std::memcpy(&odd, rows + stride, sizeof odd);
}

template <class Vector, class A>
BOUGH_INLINE void multiply(A* values, const Vector& factor) {
  Vector v;
  std::memcpy(&v, values, sizeof v);
  v *= factor;
  simd::store(values, v);
}

constexpr int64_t kPagesAhead = 4;  // between the page being computed and the page being prefetched
BOUGH_INLINE void prefetch(const void* line) {
  __builtin_prefetch(line, 0, 2);
}

// A page of one head, and a later page that is prefetched meanwhile.
template <class T>
struct PageView {
  const T* keys;
  const T* values;
  const T* keys_ahead;
  const T* values_ahead;
  unsigned ahead;  // keys of the later page that are read; 0: nothing is prefetched
};

// Computes one page for B entries: scores, running maximum and sum, weighted sum of values. The page's 16
// lanes are computed in parts that fit into a register of `vector_bytes`.
template <int64_t vector_bytes, int B, class T>
BOUGH_INLINE void visit_page(const Layer<T>& layer, const TaskView<AccOf<T>>& task, int64_t entry,
                             const uint16_t* visible, const PageView<T>& page) {
  using Acc = typename simd::Types<T>::Acc;
  constexpr int64_t kWidth = std::min<int64_t>(kLanes, vector_bytes / sizeof(Acc)), kParts = kLanes / kWidth;
  using Vector = typename simd::VectorOf<Acc, kWidth>::Vector;
  using Integers = typename simd::VectorOf<Acc, kWidth>::Integers;
  const int64_t H = layer.H, padded_H = layer.padded_H;
  const Acc* q = task.q + entry * padded_H;
  alignas(64) Acc weights[B][kLanes];
  for (int64_t part = 0; part < kLanes; part += kWidth) {
    const T* own = page.keys + part * kPairSize<T>;
    const T* later = page.keys_ahead + part * kPairSize<T>;
    Vector even[B] = {}, odd[B] = {};  // two chains per entry hide the latency of the additions
    int64_t h = 0;
    for (; h + 1 < H; h += 2) {
      Vector k0, k1;
      load_two(k0, k1, own + h * kLanes, kLanes);
      if (page.ahead != 0) {
        prefetch(later + h * kLanes);
        if (kPairSize<T> == 1) prefetch(later + (h + 1) * kLanes);
      }
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        even[b] += q[b * padded_H + h] * k0;
        odd[b] += q[b * padded_H + h + 1] * k1;
      }
    }
    if (h < H) {
      Vector k0, padding;
      load_two(k0, padding, own + h * kLanes, kLanes);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) even[b] += q[b * padded_H + h] * k0;
    }
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) simd::store(&weights[b][part], Vector(even[b] + odd[b]));
  }
  unsigned seen = 0;  // keys that an entry sees
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b) {
    const Vector nothing = Vector{} - std::numeric_limits<Acc>::infinity();
    Vector scores[kParts], largest = nothing;
#pragma GCC unroll 8
    for (int64_t part = 0; part < kParts; ++part) {
      std::memcpy(&scores[part], &weights[b][part * kWidth], sizeof scores[part]);
      if (visible[b] != kAllKeys) {
        Integers lane;
#pragma GCC unroll 16
        for (int64_t i = 0; i < kWidth; ++i) lane[i] = 1 << (part * kWidth + i);
        using Index = simd::ElementOf<Integers>;
        scores[part] = (lane & static_cast<Index>(visible[b])) != 0 ? scores[part] : nothing;
      }
      largest = largest < scores[part] ? scores[part] : largest;
    }
    seen |= visible[b];
    Acc& maximum = task.maximum[entry + b];
    Acc* output = task.output + (entry + b) * padded_H;
    Acc* sum = task.sum + (entry + b) * kLanes;
    const Acc page_maximum = simd::max_of(largest);
    if (page_maximum > maximum) {
      Vector shrink = Vector{} + (maximum - page_maximum);  // -infinity at the first page: exp gives 0
      simd::exp_nonpositive(shrink);
      for (int64_t c = 0; c < kLanes; c += kWidth) multiply(sum + c, shrink);
      for (int64_t c = 0; c < padded_H; c += kWidth) multiply(output + c, shrink);
      maximum = page_maximum;
    }
#pragma GCC unroll 8
    for (int64_t part = 0; part < kParts; ++part) {
      scores[part] -= maximum;
      simd::exp_nonpositive(scores[part]);
      Vector total;
      std::memcpy(&total, sum + part * kWidth, sizeof total);
      total += scores[part];
      simd::store(sum + part * kWidth, total);
      simd::store(&weights[b][part * kWidth], scores[part]);
    }
  }
  constexpr int64_t kTogether = kParts == 1 ? 1 : 2;  // vectors of an output that share each weight's load
  for (int64_t c = 0; c < padded_H; c += kTogether * kWidth) {
    Vector o[kTogether][B];
#pragma GCC unroll 2
    for (int64_t i = 0; i < kTogether; ++i)
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b)
        std::memcpy(&o[i][b], task.output + (entry + b) * padded_H + c + i * kWidth, sizeof o[i][b]);
    for (int64_t j = 0; (seen | page.ahead) >> j != 0; j += 2) {
      if ((page.ahead >> j & 3) != 0) {
        const T* later = page.values_ahead + j * padded_H + c * kPairSize<T>;
        prefetch(later);
        if (kPairSize<T> == 1) prefetch(later + padded_H);
      }
      if ((seen >> j & 3) == 0) continue;
#pragma GCC unroll 2
      for (int64_t i = 0; i < kTogether; ++i) {
        Vector v0, v1;
        load_two(v0, v1, page.values + j * padded_H + (c + i * kWidth) * kPairSize<T>, padded_H);
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) o[i][b] += weights[b][j] * v0;
        if ((seen >> j & 2) == 0) continue;
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) o[i][b] += weights[b][j + 1] * v1;
      }
    }
#pragma GCC unroll 2
    for (int64_t i = 0; i < kTogether; ++i)
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) simd::store(task.output + (entry + b) * padded_H + c + i * kWidth, o[i][b]);
  }
}

template <int64_t vector_bytes, class T>
BOUGH_INLINE void run_task(const Layer<T>* layer_view, const TaskView<AccOf<T>>* task_view) {
  using Acc = typename simd::Types<T>::Acc;
  using Vector = typename simd::Types<T>::Vector;
  const Layer<T>& layer = *layer_view;
  const TaskView<Acc>& task = *task_view;
  const int64_t H = layer.H, padded_H = layer.padded_H, heads = layer.heads();
  const Acc scale = static_cast<Acc>(layer.scale);
  for (int64_t e = 0; e < task.num_rows * heads; ++e) {
    const T* q = layer.q + task.rows[e / heads].token * layer.q_stride_t +
                 (task.g * heads + e % heads) * layer.q_stride_n;
    for (int64_t h = 0; h < H; ++h) task.q[e * padded_H + h] = simd::widen(q[h]) * scale;
    for (int64_t h = 0; h < padded_H; ++h) task.output[e * padded_H + h] = 0;
    for (int64_t j = 0; j < kLanes; ++j) task.sum[e * kLanes + j] = 0;
    task.maximum[e] = -std::numeric_limits<Acc>::infinity();
  }
  UpcomingPages<T, Acc> upcoming(layer, task, kPagesAhead);
  for (int64_t r = 0; r < task.num_runs; ++r) {
    const AttentionRun& run = task.runs[r];
    const int64_t entry_end = run.row_end * heads;
    for (int64_t p = run.page_begin; p < run.page_end; ++p) {
      const int64_t offset = layer.offset(task.page(run, p), task.g);
      const auto ahead = upcoming.next();
      PageView<T> page{layer.keys + offset, layer.values + offset, layer.keys + ahead.offset,
                       layer.values + ahead.offset, ahead.visible};
      for (int64_t e = run.row_begin * heads; e < entry_end;) {
        const int64_t block = entry_end - e < 4 ? entry_end - e : 4;
        uint16_t visible[4];
        for (int64_t b = 0; b < block; ++b) visible[b] = task.visible(task.rows[(e + b) / heads], p);
        switch (block) {
          case 4: visit_page<vector_bytes, 4>(layer, task, e, visible, page); break;
          case 3: visit_page<vector_bytes, 3>(layer, task, e, visible, page); break;
          case 2: visit_page<vector_bytes, 2>(layer, task, e, visible, page); break;
          default: visit_page<vector_bytes, 1>(layer, task, e, visible, page);
        }
        page.ahead = 0;
        e += block;
      }
    }
  }
  for (int64_t e = 0; e < task.num_rows * heads; ++e) {
    Vector sum;
    simd::load(sum, task.sum + e * kLanes);
    const Acc total = simd::sum_of(sum), inverse = 1 / total;
    const int64_t row = task.rows[e / heads].token * layer.N + task.g * heads + e % heads;
    if (layer.lse) layer.lse[row] = task.maximum[e] + std::log(total);
    T* o = layer.o + row * H;
    for (int64_t h = 0; h < H; ++h) simd::narrow(o[h], task.output[e * padded_H + h] * inverse);
  }
}

#define BOUGH_RUN_TASK(T)                                                                        \
  BOUGH_ON_BEST_ISA(run, (const Layer<T>* layer, const TaskView<AccOf<T>>* task), (layer, task), \
                    (run_task<kVectorBytes, T>))
BOUGH_RUN_TASK(float)
BOUGH_RUN_TASK(BFloat16Bits)
BOUGH_RUN_TASK(double)

// Stores the key and value of one token of one head. The first token of a page clears the page's values,
// because attention also reads the values of unused slots, with weight 0.
template <class T>
void store_token(T* key, T* value, const T* k, const T* v, int64_t place, int64_t H, int64_t padded_H) {
  for (int64_t h = 0; h < padded_H; ++h) key[h * kPageTokens + place] = h < H ? k[h] : T{};
  if (place == 0) std::memset(value, 0, static_cast<size_t>(kPageTokens * padded_H) * sizeof(T));
  std::memcpy(value + place * padded_H, v, static_cast<size_t>(H) * sizeof(T));
}
void store_token(BFloat16Bits* key, BFloat16Bits* value, const BFloat16Bits* k, const BFloat16Bits* v,
                 int64_t place, int64_t H, int64_t padded_H) {
  BFloat16Bits* to = key + 2 * place;
  for (int64_t h = 0; h < padded_H; h += 2, to += 2 * kPageTokens) {
    const BFloat16Bits pair[2] = {h < H ? k[h] : BFloat16Bits{}, h + 1 < H ? k[h + 1] : BFloat16Bits{}};
    std::memcpy(to, pair, sizeof pair);
  }
  if (place == 0) std::memset(value, 0, static_cast<size_t>(kPageTokens * padded_H) * sizeof(BFloat16Bits));
  to = value + place / 2 * 2 * padded_H + place % 2;
  for (int64_t h = 0; h < H; ++h) to[2 * h] = v[h];
}

// The keys and values of the pass's tokens, and the pages to which they are stored.
template <class T>
struct Tokens {
  const T* k;  // token t, head g at k + t * k_stride_t + g * k_stride_g
  const T* v;
  int64_t k_stride_t, k_stride_g, v_stride_t, v_stride_g;
  T* pages;
  int64_t G, H;

  Tokens(const at::Tensor& pages, const at::Tensor& k_TGH, const at::Tensor& v_TGH)
      : k(data<T>(k_TGH)),
        v(data<T>(v_TGH)),
        k_stride_t(k_TGH.stride(0)),
        k_stride_g(k_TGH.stride(1)),
        v_stride_t(v_TGH.stride(0)),
        v_stride_g(v_TGH.stride(1)),
        pages(mutable_data<T>(pages)),
        G(k_TGH.size(1)),
        H(k_TGH.size(2)) {}

  T* page(int64_t g, int64_t slot) const {
    return pages + (slot / kPageTokens * G + g) * 2 * kPageTokens * padded_head_dim(H);
  }

  void store(int64_t t, int64_t g, int64_t slot) const {
    const int64_t padded_H = padded_head_dim(H);
    T* keys = page(g, slot);
    store_token(keys, keys + kPageTokens * padded_H, k + t * k_stride_t + g * k_stride_g,
                v + t * v_stride_t + g * v_stride_g, slot % kPageTokens, H, padded_H);
  }

  // Prefetches the cache lines that store() will write to. This helps because store() writes only a part of
  // each line of the page's keys. The caller must call it a few tokens before store().
  void bring_near(int64_t g, int64_t slot) const {
    const int64_t padded_H = padded_head_dim(H), lines = kPageTokens * padded_H * int64_t{sizeof(T)} / 64;
    const auto* keys = reinterpret_cast<const char*>(page(g, slot));
    for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(keys + i * 64, 1);
    const int64_t rows_together = kPairSize<T>, row_bytes = padded_H * int64_t{sizeof(T)};
    const char* value = keys + lines * 64 + slot % kPageTokens / rows_together * rows_together * row_bytes;
    for (int64_t i = 0; i < rows_together * row_bytes; i += 64) __builtin_prefetch(value + i, 1);
  }
};

// Stores the keys and values of a task's query tokens in the pages, for one key/value head.
template <class T>
void store_rows(const Tokens<T>& tokens, const TaskView<AccOf<T>>& task, std::span<const int32_t> slots) {
  constexpr int64_t kAhead = 4;  // tokens between storing and prefetching
  const auto slot = [&](int64_t row) { return slots[static_cast<size_t>(task.rows[row].token)]; };
  for (int64_t row = -kAhead; row < task.num_rows; ++row) {
    if (row + kAhead < task.num_rows) tokens.bring_near(task.g, slot(row + kAhead));
    if (row >= 0) tokens.store(task.rows[row].token, task.g, slot(row));
  }
}

// Returns true if the tile kernels (paged_attention_bf16.cpp) compute this type. The choice must depend only
// on the type, so that the same token always gives the same bits.
template <class T>
bool by_tiles() {
  return std::is_same_v<T, BFloat16Bits> && has_tiles(at::kBFloat16);
}

template <class T>
void run_schedule(const Layer<T>& layer, const std::optional<Tokens<T>>& tokens,
                  const ScheduleView& schedule) {
  using Acc = typename simd::Types<T>::Acc;
  // Prompt tokens are stored before any task runs, because several tasks read them. One thread stores all
  // tokens of a key/value head, because tokens of a page are in the same cache lines.
  int64_t max_rows = 0;
  bool has_prompts = false;
  for (const AttentionTask& task : schedule.tasks) {
    max_rows = std::max<int64_t>(max_rows, task.row_end - task.row_begin);
    has_prompts |= !task.decodes;
  }
  if (tokens && has_prompts) {
    at::parallel_for(0, layer.G, 1, [&](int64_t begin, int64_t end) {
      for (const AttentionTask& task : schedule.tasks)
        for (int32_t row = task.row_begin; !task.decodes && row < task.row_end; ++row) {
          const int64_t token = schedule.rows[static_cast<size_t>(row)].token;
          for (int64_t g = begin; g < end; ++g)
            if (task.head < 0 || task.head == g)
              tokens->store(token, g, schedule.slots[static_cast<size_t>(token)]);
        }
    });
  }
  const int64_t max_entries = max_rows * layer.heads();
  const bool per_head = !schedule.tasks.empty() && schedule.tasks[0].head >= 0;
  const int64_t heads_a_task = per_head ? 1 : layer.G;
  const int64_t num_units = static_cast<int64_t>(schedule.tasks.size()) * heads_a_task;
  int64_t products = 0;  // multiply-adds of the scores; the output needs as many
  for (const AttentionTask& task : schedule.tasks) {
    for (int32_t r = task.run_begin; r < task.run_end; ++r) {
      const AttentionRun& run = schedule.runs[static_cast<size_t>(r)];
      products += int64_t{run.row_end - run.row_begin} * (run.page_end - run.page_begin) * kPageTokens *
                  heads_a_task * layer.heads() * layer.H;
    }
  }
  const int64_t num_threads =
      products < kProductsWorthThreads ? 1 : std::min<int64_t>(at::get_num_threads(), num_units);
  std::atomic<int64_t> next = 0;  // tasks differ in length, so an idle thread takes the next one
  at::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) {
    const AlignedBuffer<Acc> scratch(max_entries * (2 * layer.padded_H + kLanes + 1));
    for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < num_units;) {
      const AttentionTask& task = schedule.tasks[static_cast<size_t>(unit / heads_a_task)];
      TaskView<Acc> view;
      view.rows = schedule.rows.data() + task.row_begin;
      view.runs = schedule.runs.data() + task.run_begin;
      view.num_rows = task.row_end - task.row_begin;
      view.num_runs = task.run_end - task.run_begin;
      view.g = per_head ? task.head : unit % layer.G;
      view.pages = schedule.pages;
      view.masks = schedule.masks;
      view.output = scratch.get();
      view.q = view.output + max_entries * layer.padded_H;
      view.sum = view.q + max_entries * layer.padded_H;
      view.maximum = view.sum + max_entries * kLanes;
      if (tokens && task.decodes) store_rows(*tokens, view, schedule.slots);  // no other task reads them
      if constexpr (std::is_same_v<T, BFloat16Bits>) {
        if (by_tiles<T>()) {
          bf16::run_attention_task(layer, view);
          continue;
        }
      }
      run(&layer, &view);
    }
    if (by_tiles<T>()) bf16::end_tiles();
  });
}

}  // namespace

void store_in_pages(const at::Tensor& pages, const at::Tensor& k_TGH, const at::Tensor& v_TGH,
                    std::span<const TokenSlot> tokens) {
  if (!pages.is_cpu()) return store_in_pages_reference(pages, k_TGH, v_TGH, tokens);
  dispatch_float_types(pages.scalar_type(), "paged attention", [&]<class T>() {
    const Tokens<T> from(pages, k_TGH, v_TGH);
    at::parallel_for(0, from.G, 1, [&](int64_t begin, int64_t end) {
      for (const TokenSlot& token : tokens)
        for (int64_t g = begin; g < end; ++g) from.store(token.token, g, token.slot);
    });
  });
}

namespace {
using Optional = const std::optional<at::Tensor>&;

at::Tensor paged_attention_cpu(const at::Tensor& q_TNH, Optional k_TGH, Optional v_TGH,
                               const at::Tensor& pages, const at::Tensor& work, Optional, at::IntArrayRef,
                               double scale, Optional lse_TN) {
  at::Tensor o_TNH = at::empty(q_TNH.sizes(), q_TNH.options());
  dispatch_float_types(q_TNH.scalar_type(), "paged attention", [&]<class T>() {
    Layer<T> view;
    view.q = data<T>(q_TNH);
    view.q_stride_t = q_TNH.stride(0);
    view.q_stride_n = q_TNH.stride(1);
    view.o = mutable_data<T>(o_TNH);
    view.lse = lse_TN ? mutable_data<AccOf<T>>(*lse_TN) : nullptr;
    view.N = q_TNH.size(1);
    view.G = pages.size(1);
    view.H = q_TNH.size(2);
    view.padded_H = padded_head_dim(view.H);
    view.keys = data<T>(pages);
    view.values = view.keys + kPageTokens * view.padded_H;
    view.scale = scale;
    std::optional<Tokens<T>> tokens;
    if (k_TGH) tokens.emplace(pages, *k_TGH, *v_TGH);
    run_schedule(view, tokens, ScheduleView(work));
  });
  return o_TNH;
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("paged_attention_", TORCH_FN(bough::paged_attention_cpu));
}
