#include "kernels/page_choice/top_keys.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "base/error.h"
#include "kernels/common/op.h"
#include "kernels/common/simd.h"
#include "kernels/paged_attention/pages.h"

namespace bough {

namespace {

// The keys and values of one head, read in place (kernels/paged_attention/pages.h).
template <class T>
struct HeadOfPages {
  static constexpr int64_t kPair = sizeof(T) == 2 ? 2 : 1;
  const T* head;
  int64_t page_stride, padded_H;

  AccOf<T> key(int32_t page, int64_t j, int64_t h) const {
    return simd::widen(head[page * page_stride + (h / kPair) * kPageTokens * kPair + j * kPair + h % kPair]);
  }
  // Multiplies q [H] by each key of the page. pages.h has the layout of the page.
  void scores_of(int32_t page, const T* q, int64_t H, AccOf<T>* scores) const {
    AccOf<T> sums[kPageTokens] = {};
    const T* keys = head + page * page_stride;
    for (int64_t h = 0; h < H; ++h) {
      const AccOf<T> factor = simd::widen(q[h]);
      const T* row = keys + (h / kPair) * kPageTokens * kPair + h % kPair;
      for (int64_t j = 0; j < kPageTokens; ++j) sums[j] += factor * simd::widen(row[j * kPair]);
    }
    std::copy(sums, sums + kPageTokens, scores);
  }
  AccOf<T> value(int32_t page, int64_t j, int64_t h) const {
    return simd::widen(head[page * page_stride + kPageTokens * padded_H + (j / kPair) * padded_H * kPair +
                            h * kPair + j % kPair]);
  }
};

template <class T>
HeadOfPages<T> head_of(const at::Tensor& pages, int64_t g, int64_t H) {
  return {data<T>(pages) + g * pages.stride(1), pages.stride(0), padded_head_dim(H)};
}

// find() computes the scores of all keys of a query's context, and the keys that one query head attends to
// (`kept`, ascending).
template <class T>
struct TopKeys {
  std::vector<AccOf<T>> scores;  // scores of all keys of the context
  std::vector<AccOf<T>> ordered;
  std::vector<int32_t> kept;

  void find(const HeadOfPages<T>& head, const T* q, const ChoosingQuery& query, const TopKeysInput& in) {
    using Acc = AccOf<T>;
    const int64_t count = query.position + 1, H = in.q_TNH.size(2);
    scores.resize(query.pages.size() * kPageTokens);
    for (size_t i = 0; i < query.pages.size(); ++i)
      head.scores_of(query.pages[i], q, H, scores.data() + i * kPageTokens);
    scores.resize(static_cast<size_t>(count));  // drops the unused slots of the last page
    for (Acc& score : scores) {
      score *= static_cast<Acc>(in.scale);
      if (score != score) score = -std::numeric_limits<Acc>::infinity();
    }
    const auto most = static_cast<size_t>(std::min(count, query.budget * in.block_tokens));
    ordered.assign(scores.begin(), scores.end());
    const auto least = ordered.begin() + static_cast<int64_t>(most) - 1;  // the lowest score that is kept
    std::nth_element(ordered.begin(), least, ordered.end(), std::greater());
    auto ties = std::count(ordered.begin(), least + 1, *least);
    kept.clear();
    for (int64_t j = 0; j < count; ++j) {
      const Acc score = scores[static_cast<size_t>(j)];
      if (score > *least || (score == *least && ties-- > 0)) kept.push_back(static_cast<int32_t>(j));
    }
  }
};

void check(const TopKeysInput& in, int64_t G) {
  BOUGH_CHECK(in.q_TNH.is_cpu() && in.q_TNH.stride(2) == 1 && in.pages.is_cpu() && in.pages.dim() == 4 &&
                  in.q_TNH.size(1) % G == 0 && in.q_TNH.scalar_type() == in.pages.scalar_type() &&
                  in.pages.size(3) == kPageTokens * padded_head_dim(in.q_TNH.size(2)),
              "top keys: q ", in.q_TNH.sizes(), " ", in.q_TNH.scalar_type(), ", pages ", in.pages.sizes());
  for (const ChoosingQuery& query : in.queries)
    BOUGH_CHECK(query.token >= 0 && query.token < in.q_TNH.size(0) && query.budget > 0 &&
                    pages_for(query.position + 1) == static_cast<int64_t>(query.pages.size()),
                "top keys: query ", query.token, " at ", query.position, " of ", query.pages.size(),
                " pages");
}

template <class T>
const T* row_of(const at::Tensor& q_TNH, int64_t token, int64_t n) {
  return data<T>(q_TNH) + token * q_TNH.stride(0) + n * q_TNH.stride(1);
}

}  // namespace

void attend_to_top_keys(const TopKeysInput& in, const at::Tensor& o_TNH, at::Tensor* lse_TN) {
  const int64_t N = in.q_TNH.size(1), H = in.q_TNH.size(2), G = in.pages.size(1);
  check(in, G);
  dispatch_float_types(in.q_TNH.scalar_type(), "top keys", [&]<class T>() {
    using Acc = AccOf<T>;
    at::parallel_for(0, std::ssize(in.queries) * N, 1, [&](int64_t begin, int64_t end) {
      TopKeys<T> top;
      std::vector<Acc> sums(static_cast<size_t>(H));
      for (int64_t item = begin; item < end; ++item) {
        const ChoosingQuery& query = in.queries[static_cast<size_t>(item / N)];
        const int64_t n = item % N, row = query.token * N + n;
        const HeadOfPages<T> head = head_of<T>(in.pages, n / (N / G), H);
        top.find(head, row_of<T>(in.q_TNH, query.token, n), query, in);
        Acc most = -std::numeric_limits<Acc>::infinity(), total = 0;
        for (const int32_t j : top.kept) most = std::max(most, top.scores[static_cast<size_t>(j)]);
        std::fill(sums.begin(), sums.end(), Acc{0});
        for (const int32_t j : top.kept) {
          const Acc weight = std::exp(top.scores[static_cast<size_t>(j)] - most);
          total += weight;
          for (int64_t h = 0; h < H; ++h)
            sums[static_cast<size_t>(h)] +=
                weight * head.value(query.pages[static_cast<size_t>(j / kPageTokens)], j % kPageTokens, h);
        }
        for (int64_t h = 0; h < H; ++h)
          simd::narrow(mutable_data<T>(o_TNH)[row * H + h], sums[static_cast<size_t>(h)] / total);
        if (lse_TN) mutable_data<Acc>(*lse_TN)[row] = most + std::log(total);
      }
    });
  });
}

void top_keys_backward(const TopKeysInput& in, const at::Tensor& o_TNH, const at::Tensor& lse_TN,
                       const at::Tensor& d_o_TNH, const at::Tensor& d_q_TNH, const at::Tensor& d_k_SGH,
                       const at::Tensor& d_v_SGH) {
  const int64_t N = in.q_TNH.size(1), H = in.q_TNH.size(2), G = in.pages.size(1);
  check(in, G);
  BOUGH_CHECK(o_TNH.is_contiguous() && d_o_TNH.is_contiguous() && d_q_TNH.is_contiguous() &&
                  d_k_SGH.is_contiguous() && d_v_SGH.is_contiguous(),
              "top keys: gradients are not contiguous");
  dispatch_float_types(in.q_TNH.scalar_type(), "top keys", [&]<class T>() {
    using Acc = AccOf<T>;
    const auto one_head = [&](int64_t g) {
      const HeadOfPages<T> head = head_of<T>(in.pages, g, H);
      TopKeys<T> top;
      std::vector<Acc> d_q(static_cast<size_t>(H));
      for (const ChoosingQuery& query : in.queries)
        for (int64_t n = g * (N / G); n < (g + 1) * (N / G); ++n) {
          const int64_t row = query.token * N + n;
          const T *q = row_of<T>(in.q_TNH, query.token, n), *d_o = data<T>(d_o_TNH) + row * H;
          top.find(head, q, query, in);
          Acc product = 0;
          for (int64_t h = 0; h < H; ++h)
            product += simd::widen(d_o[h]) * simd::widen(data<T>(o_TNH)[row * H + h]);
          std::fill(d_q.begin(), d_q.end(), Acc{0});
          for (const int32_t j : top.kept) {
            const int32_t page = query.pages[static_cast<size_t>(j / kPageTokens)];
            const int64_t place = j % kPageTokens, to = ((page * kPageTokens + place) * G + g) * H;
            const Acc p = std::exp(top.scores[static_cast<size_t>(j)] - data<Acc>(lse_TN)[row]);
            Acc d_p = 0;
            for (int64_t h = 0; h < H; ++h) d_p += simd::widen(d_o[h]) * head.value(page, place, h);
            const Acc d_s = p * (d_p - product) * static_cast<Acc>(in.scale);
            for (int64_t h = 0; h < H; ++h) {
              d_q[static_cast<size_t>(h)] += d_s * head.key(page, place, h);
              mutable_data<Acc>(d_k_SGH)[to + h] += d_s * simd::widen(q[h]);
              mutable_data<Acc>(d_v_SGH)[to + h] += p * simd::widen(d_o[h]);
            }
          }
          for (int64_t h = 0; h < H; ++h)
            simd::narrow(mutable_data<T>(d_q_TNH)[row * H + h], d_q[static_cast<size_t>(h)]);
        }
    };
    at::parallel_for(0, G, 1, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) one_head(g);
    });
  });
}

}  // namespace bough
