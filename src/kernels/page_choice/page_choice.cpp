#include "kernels/page_choice/page_choice.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "kernels/common/host_to_device.h"
#include "kernels/common/op.h"
#include "kernels/common/simd.h"
#include "kernels/paged_attention/pages.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def(
      "summarise_pages_(Tensor pages, Tensor complete, bool has_extremes, int head_dim, "
      "Tensor(a!) summaries) -> ()");
  m.def(
      "choose_pages(Tensor q, Tensor summaries, bool has_extremes, Tensor queries, Tensor pages, "
      "int most_pages, int most_kept, Tensor? tables, Tensor(a!)? ids) -> Tensor");
}

namespace bough {

namespace {
using simd::kLanes;

int64_t vectors_of(BlockSummary summary) {
  BOUGH_CHECK(summary != BlockSummary::kExact, "BlockSummary::kExact has no summaries");
  return summary == BlockSummary::kMean ? 1 : 2;
}

// Summarises one block for one head. keys: those of the head in page 0, [padded H / P][16][P] (pages.h).
template <class T>
void summarise_head(const T* keys, int64_t page_stride, std::span<const int32_t> parts,
                    const SparsePolicy& policy, int64_t H, int64_t padded_H, T* to) {
  constexpr int64_t kPair = sizeof(T) == 2 ? 2 : 1;
  const int64_t per_page = policy.parts_per_page(), count = policy.part_tokens();
  for (int64_t h = 0; h < padded_H; ++h) {
    AccOf<T> total = 0, least = std::numeric_limits<AccOf<T>>::infinity(), most = -least;
    if (h >= H) least = most = 0;
    for (size_t part = 0; h < H && part < parts.size(); ++part) {
      const T* key = keys + parts[part] / per_page * page_stride + (h / kPair) * kPageTokens * kPair +
                     parts[part] % per_page * count * kPair + h % kPair;
      for (int64_t j = 0; j < count; ++j) {
        const AccOf<T> x = simd::widen(key[j * kPair]);
        total += x;
        least = x < least ? x : least;
        most = x > most ? x : most;
      }
    }
    if (policy.summary == BlockSummary::kMean) {
      simd::narrow(to[h], total / static_cast<AccOf<T>>(policy.block_tokens));
    } else {
      simd::narrow(to[h], least);
      simd::narrow(to[padded_H + h], most);
    }
  }
}

// One or two queries, averaged over the query heads of one key/value head, and the summaries of the blocks to
// score.
template <class T>
struct Scoring {
  const AccOf<T>* q;   // [queries][padded H], zeros from H on
  const T* summaries;  // of part 0 of the head
  int64_t part_stride;
  const int32_t* parts;  // the last part of each block
  int64_t count, padded_H;
  bool has_extremes;
  AccOf<T>* scores;  // [queries][count]
  int64_t num_queries;
};

// Scores kCount blocks from block i on: for each query, the products with the blocks' summaries. kExtremes is
// a template parameter, so that the compiler fuses the same products and additions for any kQueries.
template <int kQueries, int kCount, bool kExtremes, class T>
BOUGH_INLINE void score_some(const Scoring<T>& s, int64_t i) {
  using Vector = typename simd::Types<T>::Vector;
  const T* summaries[kCount];
  Vector even[kQueries][kCount] = {}, odd[kQueries][kCount] = {};  // two chains hide the latency of additions
#pragma GCC unroll 4
  for (int p = 0; p < kCount; ++p) summaries[p] = s.summaries + s.parts[i + p] * s.part_stride;
  for (int64_t h = 0; h < s.padded_H; h += 2 * kLanes) {
    Vector q0[kQueries], q1[kQueries];
#pragma GCC unroll 2
    for (int n = 0; n < kQueries; ++n) {
      simd::load(q0[n], s.q + n * s.padded_H + h);
      simd::load(q1[n], s.q + n * s.padded_H + h + kLanes);
    }
#pragma GCC unroll 4
    for (int p = 0; p < kCount; ++p) {
      const T* summary = summaries[p];
      Vector k0, k1;
      simd::load(k0, summary + h);
      simd::load(k1, summary + h + kLanes);
      Vector product0[kQueries], product1[kQueries];
#pragma GCC unroll 2
      for (int n = 0; n < kQueries; ++n) {
        product0[n] = q0[n] * k0;
        product1[n] = q1[n] * k1;
      }
      if constexpr (kExtremes) {
        simd::load(k0, summary + s.padded_H + h);
        simd::load(k1, summary + s.padded_H + h + kLanes);
#pragma GCC unroll 2
        for (int n = 0; n < kQueries; ++n) {
          simd::raise_to<typename simd::Types<T>::Integers>(product0[n], q0[n] * k0);
          simd::raise_to<typename simd::Types<T>::Integers>(product1[n], q1[n] * k1);
        }
      }
#pragma GCC unroll 2
      for (int n = 0; n < kQueries; ++n) {
        even[n][p] += product0[n];
        odd[n][p] += product1[n];
      }
    }
  }
#pragma GCC unroll 2
  for (int n = 0; n < kQueries; ++n) {
    AccOf<T>* scores = s.scores + n * s.count + i;
#pragma GCC unroll 4
    for (int p = 0; p < kCount; ++p) even[n][p] += odd[n][p];
    if constexpr (kCount == 4) {
      typename simd::VectorOf<AccOf<T>, 4>::Vector sums;
      simd::sums_of(sums, even[n][0], even[n][1], even[n][2], even[n][3]);
      simd::store(scores, sums);
    } else {
#pragma GCC unroll 4
      for (int p = 0; p < kCount; ++p) scores[p] = simd::sum_of(even[n][p]);
    }
#pragma GCC unroll 4
    for (int p = 0; p < kCount; ++p)  // NaN has no order
      if (scores[p] != scores[p]) scores[p] = -std::numeric_limits<AccOf<T>>::infinity();
  }
}

// Blocks lie anywhere in memory. Without these prefetches the loop would wait for each summary.
constexpr int64_t kBlocksAhead = 16;

template <bool kExtremes, class T>
BOUGH_INLINE void prefetch_summaries(const Scoring<T>& s, int64_t i) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t p = i; p < std::min(i + 4, s.count); ++p)
    for (int64_t h = 0; h < (kExtremes ? 2 : 1) * s.padded_H; h += kLine)
      __builtin_prefetch(s.summaries + s.parts[p] * s.part_stride + h);
}

template <int kQueries, bool kExtremes, class T>
BOUGH_INLINE void score_all(const Scoring<T>& s) {
  for (int64_t i = 0; i < kBlocksAhead; i += 4) prefetch_summaries<kExtremes>(s, i);
  int64_t i = 0;
  for (; i + 4 <= s.count; i += 4) {
    prefetch_summaries<kExtremes>(s, i + kBlocksAhead);
    score_some<kQueries, 4, kExtremes>(s, i);
  }
  for (; i < s.count; ++i) score_some<kQueries, 1, kExtremes>(s, i);
}

// One query after the other if the registers do not suffice for the sums of two.
template <int64_t kVectorBytes, bool kExtremes, class T>
BOUGH_INLINE void score_queries(Scoring<T> s) {
  if (kVectorBytes == 64 && s.num_queries == 2) return score_all<2, kExtremes>(s);
  for (int64_t n = 0; n < s.num_queries; ++n) {
    score_all<1, kExtremes>(s);
    s.q += s.padded_H;
    s.scores += s.count;
  }
}
template <int64_t kVectorBytes, class T>
BOUGH_INLINE void score_blocks(const Scoring<T>* s) {
  s->has_extremes ? score_queries<kVectorBytes, true>(*s) : score_queries<kVectorBytes, false>(*s);
}

#define BOUGH_SCORE_BLOCKS(T) \
  BOUGH_ON_BEST_ISA(score, (const Scoring<T>* s), (s), (score_blocks<kVectorBytes, T>))
BOUGH_SCORE_BLOCKS(float)
BOUGH_SCORE_BLOCKS(double)
BOUGH_SCORE_BLOCKS(BFloat16Bits)

// Raises to[j] to the largest of from[j], from[j + count], from[j + 2 count] and so on, of `total` scores.
template <class A>
struct Maxima {
  const A* from;
  int64_t total;
  A* to;
  int64_t count;
};

template <class A>
BOUGH_INLINE void raise_maxima_of(const Maxima<A>* of) {
  using Vector = typename simd::Types<A>::Vector;
  for (int64_t begin = 0; begin < of->total; begin += of->count) {
    const int64_t columns = std::min(of->count, of->total - begin);
    int64_t j = 0;
    for (; j + kLanes <= columns; j += kLanes) {
      Vector highest, x;
      simd::load(highest, of->to + j);
      simd::load(x, of->from + begin + j);
      simd::raise_to<typename simd::Types<A>::Integers>(highest, x);
      simd::store(of->to + j, highest);
    }
    for (; j < columns; ++j) of->to[j] = std::max(of->to[j], of->from[begin + j]);
  }
}

#define BOUGH_RAISE_MAXIMA(A) BOUGH_ON_BEST_ISA(raise_maxima, (const Maxima<A>* of), (of), raise_maxima_of<A>)
BOUGH_RAISE_MAXIMA(float)
BOUGH_RAISE_MAXIMA(double)

// The scratch of one thread.
template <class T>
struct Room {
  std::vector<AccOf<T>> q, scores, highest;
  std::vector<int32_t> order, parts;  // order only grows
};

// Writes the indices of the `count` highest scores, ascending, to the beginning of room.order. Finds a lower
// bound of these scores first: the scores are divided into sets, and the bound is the `count`-th largest of
// the sets' maxima. Only the scores that reach the bound are then ordered, which are few more than `count`.
template <class T>
void find_highest(Room<T>& room, std::span<const AccOf<T>> scores, size_t count) {
  // With at least 4 · `count` sets, few more scores than `count` reach the bound.
  const size_t members = std::min<size_t>(scores.size() / (4 * count), 16);
  auto bound = -std::numeric_limits<AccOf<T>>::infinity();
  if (members > 1) {
    room.highest.assign((scores.size() + members - 1) / members, bound);
    const Maxima<AccOf<T>> maxima{scores.data(), std::ssize(scores), room.highest.data(),
                                  std::ssize(room.highest)};
    raise_maxima(&maxima);
    const auto last = room.highest.begin() + static_cast<int64_t>(count) - 1;
    std::nth_element(room.highest.begin(), last, room.highest.end(), std::greater<>());
    bound = *last;
  }
  if (room.order.size() < scores.size()) room.order.resize(scores.size());
  auto end = room.order.begin();
  for (size_t i = 0; i < scores.size(); ++i) {  // without a branch, which would be mispredicted often
    *end = static_cast<int32_t>(i);
    end += scores[i] >= bound ? 1 : 0;
  }
  const auto is_before = [&](int32_t a, int32_t b) {
    const auto score_a = scores[static_cast<size_t>(a)], score_b = scores[static_cast<size_t>(b)];
    return score_a > score_b || (score_a == score_b && a < b);
  };
  const auto kept = room.order.begin() + static_cast<int64_t>(count);
  std::nth_element(room.order.begin(), kept - 1, end, is_before);
  std::sort(room.order.begin(), kept);
}

// Returns the last parts of a query's blocks from block first_blocks on.
template <class T>
const int32_t* parts_of(const ChoosingQuery& query, const SparsePolicy& policy, int64_t count,
                        Room<T>& room) {
  if (policy.block_tokens == kPageTokens) return query.pages.data() + policy.first_blocks;
  room.parts.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    room.parts[static_cast<size_t>(i)] = policy.last_part(query.pages, policy.first_blocks + i);
  return room.parts.data();
}

// Whether two queries score the same blocks. Queries of one sequence have pages that begin at one address.
bool score_the_same(const ChoosingQuery& a, const ChoosingQuery& b, const SparsePolicy& policy) {
  return a.pages.data() == b.pages.data() &&
         policy.blocks_for(a.position + 1) == policy.blocks_for(b.position + 1) && a.budget == b.budget;
}

// Writes the lists of one query, or of two that score the same blocks, for key/value head g. lists: the first
// query's lists of all heads, then the second's.
template <class T>
void choose(const at::Tensor& q_TNH, const at::Tensor& summaries, const SparsePolicy& policy,
            std::span<const ChoosingQuery> queries, int64_t g, Room<T>& room,
            std::span<std::vector<int32_t>> lists) {
  const ChoosingQuery& query = queries.front();
  const int64_t G = summaries.size(1), padded_H = summaries.size(3), H = q_TNH.size(2);
  const auto list_of = [&](size_t i) -> std::vector<int32_t>& {
    return lists[i * static_cast<size_t>(G) + static_cast<size_t>(g)];
  };
  const int64_t visible = policy.blocks_for(query.position + 1), budget = query.budget;
  for (size_t i = 0; i < queries.size(); ++i) {
    list_of(i).resize(static_cast<size_t>(std::min(visible, budget)));
    std::iota(list_of(i).begin(), list_of(i).end(), 0);
  }
  if (visible <= budget) return;
  const int64_t heads = q_TNH.size(1) / G;
  room.q.assign(queries.size() * static_cast<size_t>(padded_H), 0);
  for (size_t i = 0; i < queries.size(); ++i) {
    AccOf<T>* const mean = room.q.data() + static_cast<int64_t>(i) * padded_H;
    for (int64_t n = g * heads; n < (g + 1) * heads; ++n) {
      const T* q = data<T>(q_TNH) + queries[i].token * q_TNH.stride(0) + n * q_TNH.stride(1);
      for (int64_t h = 0; h < H; ++h) mean[h] += simd::widen(q[h]);
    }
  }
  for (AccOf<T>& x : room.q) x /= static_cast<AccOf<T>>(heads);
  const int64_t first = policy.first_blocks, candidates = visible - first - policy.last_blocks;
  room.scores.resize(queries.size() * static_cast<size_t>(candidates));
  const Scoring<T> scoring{.q = room.q.data(),
                           .summaries = data<T>(summaries) + g * summaries.stride(1),
                           .part_stride = summaries.stride(0),
                           .parts = parts_of(query, policy, candidates, room),
                           .count = candidates,
                           .padded_H = padded_H,
                           .has_extremes = policy.summary == BlockSummary::kMinMax,
                           .scores = room.scores.data(),
                           .num_queries = std::ssize(queries)};
  score(&scoring);
  const int64_t kept = policy.chosen_of(budget);
  for (size_t i = 0; i < queries.size(); ++i) {
    std::vector<int32_t>& list = list_of(i);
    const std::span<const AccOf<T>> scores =
        std::span(room.scores).subspan(i * static_cast<size_t>(candidates), static_cast<size_t>(candidates));
    find_highest(room, scores, static_cast<size_t>(kept));
    std::transform(room.order.begin(), room.order.begin() + kept, list.begin() + first,
                   [first](int32_t block) { return static_cast<int32_t>(block + first); });
    std::iota(list.end() - policy.last_blocks, list.end(),
              static_cast<int32_t>(visible - policy.last_blocks));
  }
}

// Queries that see no more pages than their budget keep all pages, so they are not sent to the device.
void choose_on_cuda(const at::Tensor& q_TNH, const at::Tensor& summaries, const SparsePolicy& policy,
                    std::span<const ChoosingQuery> queries, std::span<std::vector<int32_t>> lists) {
  BOUGH_CHECK(policy.is_by_pages(), "blocks of ", policy.block_tokens, " tokens, ", policy.first_blocks,
              " and ", policy.last_blocks, " always kept; CUDA chooses whole pages");
  const auto G = static_cast<size_t>(summaries.size(1));
  std::vector<ChoosingQuery> asked;
  std::vector<std::vector<int32_t>> of_asked;
  const auto is_asked = [](const ChoosingQuery& query) {
    return static_cast<int64_t>(query.pages.size()) > query.budget;
  };
  std::ranges::copy_if(queries, std::back_inserter(asked), is_asked);
  if (!asked.empty()) {
    of_asked.resize(asked.size() * G);
    complete_lists(
        DevicePageChooser(asked, {}, q_TNH.device()).choose(q_TNH, summaries, policy.summary).cpu(), asked,
        of_asked);
  }
  auto next = of_asked.begin();
  for (size_t i = 0; i < lists.size(); ++i) {
    const ChoosingQuery& query = queries[i / G];
    if (is_asked(query)) {
      lists[i] = std::move(*next++);
      continue;
    }
    lists[i].resize(query.pages.size());
    std::iota(lists[i].begin(), lists[i].end(), 0);
  }
}

void check_summaries(const at::Tensor& summaries, const SparsePolicy& policy, int64_t head_dim) {
  const int64_t num_pages = summaries.size(0) / policy.parts_per_page();
  BOUGH_CHECK(
      (summaries.is_cpu() || summaries.is_cuda()) && summaries.is_contiguous() && summaries.dim() == 4 &&
          summaries.sizes() == at::IntArrayRef(summary_sizes(policy, num_pages, summaries.size(1), head_dim)),
      "summaries of blocks: got ", summaries.sizes(), " on ", summaries.device().str());
}

}  // namespace

std::vector<int64_t> summary_sizes(const SparsePolicy& policy, int64_t num_pages, int64_t num_kv_heads,
                                   int64_t head_dim) {
  return {num_pages * policy.parts_per_page(), num_kv_heads, vectors_of(policy.summary),
          padded_head_dim(head_dim)};
}

void summarise_blocks(const at::Tensor& pages, std::span<const int32_t> complete, const SparsePolicy& policy,
                      int64_t head_dim, const at::Tensor& summaries) {
  check_summaries(summaries, policy, head_dim);
  const int64_t G = summaries.size(1), padded_H = summaries.size(3);
  if (pages.is_cuda()) {
    BOUGH_CHECK(policy.block_tokens == kPageTokens, "blocks of ", policy.block_tokens, " tokens on CUDA");
    return summarise_pages(pages, upload(complete, pages.device()), policy.summary, head_dim, summaries);
  }
  const auto parts_per_block = static_cast<size_t>(policy.parts_per_block());
  BOUGH_CHECK(pages.is_cpu() && pages.dim() == 4 &&
                  pages.size(0) * policy.parts_per_page() == summaries.size(0) && pages.size(1) == G &&
                  pages.size(3) == kPageTokens * padded_H && pages.scalar_type() == summaries.scalar_type() &&
                  complete.size() % parts_per_block == 0,
              "pages ", pages.sizes(), " ", pages.scalar_type(), ", summaries of their blocks ",
              summaries.sizes(), " ", summaries.scalar_type(), ", ", complete.size(), " parts");
  dispatch_float_types(pages.scalar_type(), "block choice", [&]<class T>() {
    const auto items = static_cast<int64_t>(complete.size() / parts_per_block) * G;
    at::parallel_for(0, items, grain(policy.block_tokens * padded_H), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto parts = complete.subspan(static_cast<size_t>(i / G) * parts_per_block, parts_per_block);
        const int64_t g = i % G;
        summarise_head(
            data<T>(pages) + g * pages.stride(1), pages.stride(0), parts, policy, head_dim, padded_H,
            mutable_data<T>(summaries) + parts.back() * summaries.stride(0) + g * summaries.stride(1));
      }
    });
  });
}

void choose_blocks(const at::Tensor& q_TNH, const at::Tensor& summaries, const SparsePolicy& policy,
                   std::span<const ChoosingQuery> queries, std::span<std::vector<int32_t>> lists) {
  check_summaries(summaries, policy, q_TNH.size(2));
  const int64_t G = summaries.size(1);
  BOUGH_CHECK(lists.size() == queries.size() * static_cast<size_t>(G) && q_TNH.stride(2) == 1 &&
                  q_TNH.size(1) % G == 0 && q_TNH.scalar_type() == summaries.scalar_type(),
              lists.size(), " lists for ", queries.size(), " queries, q ", q_TNH.sizes(), " ",
              q_TNH.scalar_type(), ", summaries ", summaries.sizes());
  int64_t most = 1;
  for (const ChoosingQuery& query : queries) {
    BOUGH_CHECK(query.token >= 0 && query.token < q_TNH.size(0) && query.position >= 0 &&
                    pages_for(query.position + 1) == std::ssize(query.pages) &&
                    query.budget >= policy.least_budget(),
                "choose_blocks: query ", query.token, " of ", q_TNH.size(0), " at position ", query.position,
                ", with ", query.pages.size(), " pages and a budget of ", query.budget,
                " blocks, expected at least ", policy.least_budget());
    most = std::max(most, policy.blocks_for(query.position + 1));
  }
  if (q_TNH.is_cuda()) return choose_on_cuda(q_TNH, summaries, policy, queries, lists);
  dispatch_float_types(q_TNH.scalar_type(), "block choice", [&]<class T>() {
    at::parallel_for(0, std::ssize(lists), grain(most * summaries.size(3) / 4),
                     [&](int64_t begin, int64_t end) {
                       Room<T> room;
                       size_t count = 1;
                       for (int64_t item = begin; item < end; item += static_cast<int64_t>(count)) {
                         // By head, then by query: the summaries of a head stay in the cache.
                         const int64_t g = item / std::ssize(queries);
                         const auto i = static_cast<size_t>(item % std::ssize(queries));
                         const bool both = item + 1 < end && i + 1 < queries.size() &&
                                           score_the_same(queries[i], queries[i + 1], policy);
                         count = both ? 2 : 1;
                         choose<T>(q_TNH, summaries, policy, queries.subspan(i, count), g, room,
                                   lists.subspan(i * static_cast<size_t>(G)));
                       }
                     });
  });
}

void summarise_pages(const at::Tensor& pages, const at::Tensor& complete_C, BlockSummary summary,
                     int64_t head_dim, const at::Tensor& summaries) {
  using Op = void(const at::Tensor&, const at::Tensor&, bool, int64_t, const at::Tensor&);
  static const auto op = find_op<Op>("bough::summarise_pages_");
  op.call(pages, complete_C, summary == BlockSummary::kMinMax, head_dim, summaries);
}

DevicePageChooser::DevicePageChooser(std::span<const ChoosingQuery> queries, std::span<const int32_t> tables,
                                     at::Device device) {
  std::vector<int32_t> records, pages;  // records: PageChoiceQuery
  for (const ChoosingQuery& query : queries) {
    const auto count = static_cast<int64_t>(query.pages.size()),
               kept = SparsePolicy().chosen_of(query.budget);
    BOUGH_CHECK(query.budget >= SparsePolicy().least_budget() && count > query.budget, "a query of ", count,
                " pages with a budget of ", query.budget, "; expected more pages than the budget");
    for (const int64_t number : {query.token, static_cast<int64_t>(pages.size()), count, kept})
      records.push_back(static_cast<int32_t>(number));
    pages.insert(pages.end(), query.pages.begin(), query.pages.end());
    most_pages_ = std::max(most_pages_, count);
    most_kept_ = std::max(most_kept_, kept);
  }
  HostToDeviceBatch sent(device);
  sent.add(std::span<const int32_t>(records), &queries_Q4_);
  sent.add(std::span<const int32_t>(pages), &pages_);
  sent.add(tables, &tables_);
  sent.send();
  queries_Q4_ = queries_Q4_.view({-1, 4});
}

at::Tensor DevicePageChooser::choose(const at::Tensor& q_TNH, const at::Tensor& summaries,
                                     BlockSummary summary, const at::Tensor* ids) const {
  using Tensor = const at::Tensor&;
  using Optional = const std::optional<at::Tensor>&;
  using Op = at::Tensor(Tensor, Tensor, bool, Tensor, Tensor, int64_t, int64_t, Optional, Optional);
  static const auto op = find_op<Op>("bough::choose_pages");
  BOUGH_CHECK(!ids || (tables_.numel() == queries_Q4_.size(0) * summaries.size(1) && ids->is_contiguous() &&
                       ids->scalar_type() == at::kInt),
              "page choice: got ", tables_.numel(), " tables for ", queries_Q4_.size(0), " queries of ",
              summaries.size(1), " heads");
  return op.call(q_TNH, summaries, summary == BlockSummary::kMinMax, queries_Q4_, pages_, most_pages_,
                 most_kept_, ids ? std::optional(tables_) : std::nullopt,
                 ids ? std::optional(*ids) : std::nullopt);
}

void complete_lists(const at::Tensor& chosen_QGK, std::span<const ChoosingQuery> queries,
                    std::span<std::vector<int32_t>> lists) {
  const auto G = static_cast<size_t>(chosen_QGK.size(1));
  BOUGH_CHECK(lists.size() == queries.size() * G && chosen_QGK.is_contiguous(), lists.size(), " lists for ",
              queries.size(), " queries of ", G, " heads");
  const int32_t* from = data<int32_t>(chosen_QGK);
  for (size_t i = 0; i < lists.size(); ++i, from += chosen_QGK.size(2)) {
    const ChoosingQuery& query = queries[i / G];
    const auto visible = static_cast<int32_t>(query.pages.size());
    lists[i].assign(1, 0);
    lists[i].insert(lists[i].end(), from, from + SparsePolicy().chosen_of(query.budget));
    lists[i].insert(lists[i].end(), {visible - 2, visible - 1});
  }
}

}  // namespace bough
