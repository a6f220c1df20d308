// Loops of paged attention on the CPU. A task's rows times the heads of one key/value head are its "entries";
// each has a running maximum, a running sum (a vector, folded at the end) and a running output. Four entries
// go through a page together, so that each load of the page serves four products; an entry's operations and
// their order are the same however many neighbours it has.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "base/error.h"
#include "kernels/common/simd.h"
#include "kernels/paged_attention/paged_attention_cpu.h"

namespace bough {

namespace {

using simd::kLanes;
static_assert(kLanes == kPageTokens);

// Starting threads costs some 5 microseconds, in which one thread does about this many multiply-adds.
constexpr int64_t kProductsWorthThreads = 200000;

template <class T>
struct LayerView {
  const T* q;  // token t, head n at q + t * q_stride_t + n * q_stride_n
  int64_t q_stride_t, q_stride_n;
  T* o;                               // [T, N, H]
  const T* keys;                      // [pages, G, H, 16]
  const T* values;                    // [pages, G, 16, padded H]
  typename simd::Types<T>::Acc* lse;  // [T, N], or null
  typename simd::Types<T>::Acc scale;
  int64_t N, G, H, padded_H;
};

// One task and one key/value head, with room for its entries.
template <class T>
struct TaskView {
  using Acc = typename simd::Types<T>::Acc;
  const AttentionRow* rows;
  const AttentionRun* runs;
  int64_t num_rows, num_runs, g;
  Acc* q;        // [entries, H], scaled by 1/sqrt(H)
  Acc* output;   // [entries, padded H]
  Acc* sum;      // [entries, 16]
  Acc* maximum;  // [entries]
};

// One page, B entries: scores, running maximum and sum, weighted values.
template <int B, class T>
BOUGH_INLINE void visit_page(const LayerView<T>& layer, const TaskView<T>& task, int64_t entry,
                             const int64_t* counts, const T* keys, const T* values) {
  using Acc = typename simd::Types<T>::Acc;
  using Vector = typename simd::Types<T>::Vector;
  using Integers = typename simd::Types<T>::Integers;
  const int64_t H = layer.H, padded_H = layer.padded_H;
  const Acc* q = task.q + entry * H;
  Vector even[B] = {}, odd[B] = {};  // two chains an entry hide the latency of the additions
  int64_t h = 0;
  for (; h + 1 < H; h += 2) {
    Vector k0, k1;
    simd::load(k0, keys + h * kLanes);
    simd::load(k1, keys + (h + 1) * kLanes);
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      even[b] += q[b * H + h] * k0;
      odd[b] += q[b * H + h + 1] * k1;
    }
  }
  if (h < H) {
    Vector k0;
    simd::load(k0, keys + h * kLanes);
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) even[b] += q[b * H + h] * k0;
  }
  const Integers lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  alignas(64) Acc weights[B][kLanes];
  int64_t num_keys = 0;
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b) {
    const Vector nothing = Vector{} - std::numeric_limits<Acc>::infinity();
    Vector scores = even[b] + odd[b];
    using Index = std::remove_cvref_t<decltype(lane[0])>;
    if (counts[b] < kLanes) scores = lane < static_cast<Index>(counts[b]) ? scores : nothing;
    if (counts[b] > num_keys) num_keys = counts[b];
    Acc& maximum = task.maximum[entry + b];
    Acc* output = task.output + (entry + b) * padded_H;
    Vector sum;
    simd::load(sum, task.sum + (entry + b) * kLanes);
    const Acc page_maximum = simd::max_of(scores);
    if (page_maximum > maximum) {
      Vector shrink = Vector{} + (maximum - page_maximum);  // -infinity at the first page: exp gives 0
      simd::exp_nonpositive(shrink);
      sum *= shrink;
      for (int64_t c = 0; c < padded_H; c += kLanes) {
        Vector o;
        simd::load(o, output + c);
        o *= shrink;
        simd::store(output + c, o);
      }
      maximum = page_maximum;
    }
    scores -= maximum;
    simd::exp_nonpositive(scores);
    sum += scores;
    simd::store(task.sum + (entry + b) * kLanes, sum);
    simd::store(&weights[b][0], scores);
  }
  for (int64_t c = 0; c < padded_H; c += kLanes) {
    Vector o[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) simd::load(o[b], task.output + (entry + b) * padded_H + c);
    for (int64_t j = 0; j < num_keys; ++j) {
      Vector v;
      simd::load(v, values + j * padded_H + c);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) o[b] += weights[b][j] * v;
    }
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) simd::store(task.output + (entry + b) * padded_H + c, o[b]);
  }
}

template <class T>
BOUGH_INLINE void run_task(const LayerView<T>* layer_view, const TaskView<T>* task_view) {
  using Acc = typename simd::Types<T>::Acc;
  using Vector = typename simd::Types<T>::Vector;
  const LayerView<T>& layer = *layer_view;
  const TaskView<T>& task = *task_view;
  const int64_t H = layer.H, padded_H = layer.padded_H, heads = layer.N / layer.G;
  for (int64_t e = 0; e < task.num_rows * heads; ++e) {
    const T* q = layer.q + task.rows[e / heads].token * layer.q_stride_t +
                 (task.g * heads + e % heads) * layer.q_stride_n;
    for (int64_t h = 0; h < H; ++h) task.q[e * H + h] = simd::widen(q[h]) * layer.scale;
    for (int64_t h = 0; h < padded_H; ++h) task.output[e * padded_H + h] = 0;
    for (int64_t j = 0; j < kLanes; ++j) task.sum[e * kLanes + j] = 0;
    task.maximum[e] = -std::numeric_limits<Acc>::infinity();
  }
  for (int64_t r = 0; r < task.num_runs; ++r) {
    const AttentionRun& run = task.runs[r];
    const int64_t entry_end = run.row_end * heads;
    for (int64_t p = run.page_begin; p < run.page_end; ++p) {
      const int64_t page = run.pages.data()[p] * layer.G + task.g;
      const T* keys = layer.keys + page * H * kLanes;
      const T* values = layer.values + page * padded_H * kLanes;
      for (int64_t e = run.row_begin * heads; e < entry_end;) {
        const int64_t block = entry_end - e < 4 ? entry_end - e : 4;
        int64_t counts[4];
        for (int64_t b = 0; b < block; ++b) {
          const int64_t count = task.rows[(e + b) / heads].limit - p * kLanes;
          counts[b] = count < kLanes ? count : kLanes;
        }
        switch (block) {
          case 4: visit_page<4>(layer, task, e, counts, keys, values); break;
          case 3: visit_page<3>(layer, task, e, counts, keys, values); break;
          case 2: visit_page<2>(layer, task, e, counts, keys, values); break;
          default: visit_page<1>(layer, task, e, counts, keys, values);
        }
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

#define BOUGH_RUN_TASK(T) \
  BOUGH_ON_BEST_ISA(run, (const LayerView<T>* layer, const TaskView<T>* task), (layer, task), run_task<T>)
BOUGH_RUN_TASK(float)
BOUGH_RUN_TASK(BFloat16Bits)
BOUGH_RUN_TASK(double)

template <class T>
void store_tokens(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& k_TGH,
                  const at::Tensor& v_TGH, std::span<const int64_t> slots) {
  const int64_t G = k_TGH.size(1), H = k_TGH.size(2), padded_H = values.size(3);
  const T* k_data = static_cast<const T*>(k_TGH.const_data_ptr());
  const T* v_data = static_cast<const T*>(v_TGH.const_data_ptr());
  T* key_pages = static_cast<T*>(keys.mutable_data_ptr());
  T* value_pages = static_cast<T*>(values.mutable_data_ptr());
  const int64_t k_stride_t = k_TGH.stride(0), k_stride_g = k_TGH.stride(1);
  const int64_t v_stride_t = v_TGH.stride(0), v_stride_g = v_TGH.stride(1);
  at::parallel_for(0, k_TGH.size(0), 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t page = slots[static_cast<size_t>(t)] / kPageTokens,
                    place = slots[static_cast<size_t>(t)] % kPageTokens;
      for (int64_t g = 0; g < G; ++g) {
        const T* k = k_data + t * k_stride_t + g * k_stride_g;
        const T* v = v_data + t * v_stride_t + g * v_stride_g;
        T* key = key_pages + (page * G + g) * H * kPageTokens + place;
        T* value = value_pages + ((page * G + g) * kPageTokens + place) * padded_H;
        for (int64_t h = 0; h < H; ++h) key[h * kPageTokens] = k[h];
        std::memcpy(value, v, static_cast<size_t>(H) * sizeof(T));
        std::memset(value + H, 0, static_cast<size_t>(padded_H - H) * sizeof(T));
      }
    }
  });
}

template <class T>
void run_schedule(const LayerView<T>& layer, const AttentionSchedule& schedule) {
  using Acc = typename simd::Types<T>::Acc;
  int64_t max_rows = 0;
  for (const AttentionTask& task : schedule.tasks)
    max_rows = std::max<int64_t>(max_rows, task.row_end - task.row_begin);
  const int64_t max_entries = max_rows * (layer.N / layer.G);
  const int64_t num_units = static_cast<int64_t>(schedule.tasks.size()) * layer.G;
  int64_t products = 0;  // multiply-adds of the scores; the values take as many
  for (const AttentionTask& task : schedule.tasks) {
    for (int32_t r = task.run_begin; r < task.run_end; ++r) {
      const AttentionRun& run = schedule.runs[static_cast<size_t>(r)];
      products +=
          (run.row_end - run.row_begin) * (run.page_end - run.page_begin) * kPageTokens * layer.N * layer.H;
    }
  }
  const int64_t num_threads =
      products < kProductsWorthThreads ? 1 : std::min<int64_t>(at::get_num_threads(), num_units);
  std::atomic<int64_t> next = 0;  // tasks differ in length: threads take the next one when they are free
  at::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) {
    std::vector<Acc> scratch(static_cast<size_t>(max_entries * (layer.H + layer.padded_H + kLanes + 1)));
    for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < num_units;) {
      const AttentionTask& task = schedule.tasks[static_cast<size_t>(unit / layer.G)];
      TaskView<T> view;
      view.rows = schedule.rows.data() + task.row_begin;
      view.runs = schedule.runs.data() + task.run_begin;
      view.num_rows = task.row_end - task.row_begin;
      view.num_runs = task.run_end - task.run_begin;
      view.g = unit % layer.G;
      view.output = scratch.data();
      view.sum = view.output + max_entries * layer.padded_H;
      view.q = view.sum + max_entries * kLanes;
      view.maximum = view.q + max_entries * layer.H;
      run(&layer, &view);
    }
  });
}

template <class Function>
void dispatch(at::ScalarType type, Function&& function) {
  switch (type) {
    case at::kFloat: return function(float{});
    case at::kDouble: return function(double{});
    case at::kBFloat16: return function(BFloat16Bits{});
    default: BOUGH_CHECK(false, "paged attention computes in fp32, fp64 and bf16, got ", type);
  }
}

}  // namespace

void store_in_pages(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& k_TGH,
                    const at::Tensor& v_TGH, std::span<const int64_t> slots) {
  dispatch(keys.scalar_type(), [&]<class T>(T) { store_tokens<T>(keys, values, k_TGH, v_TGH, slots); });
}

at::Tensor paged_attention(const at::Tensor& q_TNH, const at::Tensor& keys, const at::Tensor& values,
                           const AttentionSchedule& schedule, double scale, const at::Tensor* lse_TN) {
  at::Tensor o_TNH = at::empty(q_TNH.sizes(), q_TNH.options());
  dispatch(q_TNH.scalar_type(), [&]<class T>(T) {
    using Acc = typename simd::Types<T>::Acc;
    LayerView<T> view;
    view.q = static_cast<const T*>(q_TNH.const_data_ptr());
    view.q_stride_t = q_TNH.stride(0);
    view.q_stride_n = q_TNH.stride(1);
    view.o = static_cast<T*>(o_TNH.mutable_data_ptr());
    view.keys = static_cast<const T*>(keys.const_data_ptr());
    view.values = static_cast<const T*>(values.const_data_ptr());
    view.lse = lse_TN ? static_cast<Acc*>(lse_TN->mutable_data_ptr()) : nullptr;
    view.scale = static_cast<Acc>(scale);
    view.N = q_TNH.size(1);
    view.G = keys.size(1);
    view.H = q_TNH.size(2);
    view.padded_H = values.size(3);
    run_schedule(view, schedule);
  });
  return o_TNH;
}

}  // namespace bough
