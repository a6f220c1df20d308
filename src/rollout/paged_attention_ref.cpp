// The same attention in tensor ops: gathers the pages of some sequences, masks, softmax. Any device.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>

#include <cmath>

#include "kernels/parameter.h"
#include "rollout/paged_attention.h"

namespace bough {

namespace {

// Gathered keys and values of one batch of sequences, in the accumulator type.
constexpr int64_t kGatherBytes = 256 << 20;

}  // namespace

at::Tensor PagedAttention::attend_reference(int64_t layer, const at::Tensor& q_TNH, const at::Tensor& k_TGH,
                                            const at::Tensor& v_TGH) {
  const int64_t N = q_TNH.size(1), H = q_TNH.size(2), G = k_TGH.size(1);
  const auto device = q_TNH.device();
  const at::ScalarType acc = accumulator_type(q_TNH.scalar_type());
  at::Tensor keys = storage_.keys(layer);
  at::Tensor values = storage_.values(layer);
  const int64_t padded_H = values.size(3), pair = values.size(4);

  const at::Tensor slots_T = at::tensor(slots_, at::kLong).to(device);
  const at::Tensor page_T = slots_T.div(kPageTokens, "floor"), place_T = slots_T.remainder(kPageTokens);
  const std::vector<int64_t> padding = {0, padded_H - H};
  keys.permute({0, 3, 1, 2, 4})
      .index_put_({page_T, place_T},
                  at::constant_pad_nd(k_TGH, padding).reshape({-1, G, padded_H / pair, pair}));
  values.permute({0, 2, 4, 1, 3})
      .index_put_({page_T, place_T.div(pair, "floor"), place_T.remainder(pair)},
                  at::constant_pad_nd(v_TGH, padding));

  at::Tensor o_TNH = at::empty(q_TNH.sizes(), q_TNH.options());
  for (size_t first = 0, token = 0; first < segments_.size();) {
    // A batch: neighbours with equally many tokens, as far as memory allows.
    const int64_t count = segments_[first].count;
    int64_t num_pages = 0;
    size_t last = first;
    for (; last < segments_.size() && segments_[last].count == count; ++last) {
      const int64_t needed = pages_for(segments_[last].begin + count);
      const int64_t bytes = static_cast<int64_t>(last - first + 1) * std::max(num_pages, needed) *
                            kPageTokens * G * H * 2 * static_cast<int64_t>(c10::elementSize(acc));
      if (last > first && bytes > kGatherBytes) break;
      num_pages = std::max(num_pages, needed);
    }
    const int64_t S = static_cast<int64_t>(last - first);
    std::vector<int64_t> tables, begins;
    for (size_t s = first; s < last; ++s) {
      for (int64_t p = 0; p < num_pages; ++p) {
        const bool present = p < pages_for(segments_[s].begin + count);
        tables.push_back(present ? segments_[s].pages[static_cast<size_t>(p)] : 0);
      }
      begins.push_back(segments_[s].begin);
    }
    const int64_t K = num_pages * kPageTokens;
    const at::Tensor table = at::tensor(tables, at::kLong).to(device);
    const at::Tensor begin_S = at::tensor(begins, at::kLong).to(device);
    const at::Tensor key_K = at::arange(K, begin_S.options());
    const at::Tensor query_Sc = begin_S.unsqueeze(1) + at::arange(count, begin_S.options());
    const at::Tensor hidden_ScK = key_K.unsqueeze(0).unsqueeze(0) > query_Sc.unsqueeze(2);
    const at::Tensor unused_SK = key_K.unsqueeze(0) >= begin_S.unsqueeze(1) + count;

    const at::Tensor k_SGHK = keys.index_select(0, table)
                                  .view({S, num_pages, G, padded_H / pair, kPageTokens, pair})
                                  .permute({0, 2, 3, 5, 1, 4})
                                  .reshape({S, G, padded_H, K})
                                  .narrow(2, 0, H)
                                  .to(acc);
    const at::Tensor v_SGKH = values.index_select(0, table)
                                  .view({S, num_pages, G, kPageTokens / pair, padded_H, pair})
                                  .permute({0, 2, 1, 3, 5, 4})
                                  .reshape({S, G, K, padded_H})
                                  .narrow(3, 0, H)
                                  .to(acc)
                                  .masked_fill(unused_SK.view({S, 1, K, 1}), 0.0);
    const at::Tensor q = q_TNH.narrow(0, static_cast<int64_t>(token), S * count)
                             .reshape({S, count, G, N / G, H})
                             .permute({0, 2, 3, 1, 4})
                             .reshape({S, G, N / G * count, H})
                             .to(acc);
    at::Tensor scores = at::matmul(q, k_SGHK).mul_(1.0 / std::sqrt(static_cast<double>(H)));
    scores =
        scores.view({S, G, N / G, count, K}).masked_fill(hidden_ScK.view({S, 1, 1, count, K}), -INFINITY);
    const at::Tensor p = at::softmax(scores, -1).view({S, G, N / G * count, K});
    const at::Tensor o = at::matmul(p, v_SGKH).view({S, G, N / G, count, H}).permute({0, 3, 1, 2, 4});
    o_TNH.narrow(0, static_cast<int64_t>(token), S * count).copy_(o.reshape({S * count, N, H}));
    token += static_cast<size_t>(S * count);
    first = last;
  }
  return o_TNH;
}

}  // namespace bough
