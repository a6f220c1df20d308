#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "kernels/paged_attention/paged_attention.h"
#include "kernels/parameter.h"

namespace bough {

namespace {

// Most bytes of the keys and values, in the accumulator type, that are gathered for one batch of entries.
constexpr int64_t kGatherBytes = 256 << 20;

using Optional = const std::optional<at::Tensor>&;

void store(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& k_TGH, const at::Tensor& v_TGH,
           const at::Tensor& slot_T) {
  const int64_t padded_H = values.size(3), pair = values.size(4), G = k_TGH.size(1);
  const at::Tensor page_T = slot_T.div(kPageTokens, "floor"), place_T = slot_T.remainder(kPageTokens);
  const std::vector<int64_t> padding = {0, padded_H - k_TGH.size(2)};
  keys.permute({0, 3, 1, 2, 4})
      .index_put_({page_T, place_T},
                  at::constant_pad_nd(k_TGH, padding).reshape({-1, G, padded_H / pair, pair}));
  values.permute({0, 2, 4, 1, 3})
      .index_put_({page_T, place_T.div(pair, "floor"), place_T.remainder(pair)},
                  at::constant_pad_nd(v_TGH, padding));
}

struct Entry {  // a query token and a key/value head
  int64_t token, g, limit;
  std::span<const int32_t> pages, masks;  // masks: empty if all keys are visible
};

std::vector<Entry> entries_of(const ScheduleView& schedule, int64_t num_kv_heads) {
  std::vector<Entry> entries;
  for (const AttentionTask& task : schedule.tasks)
    for (int32_t r = task.row_begin; r < task.row_end; ++r) {
      const AttentionRow& row = schedule.rows[static_cast<size_t>(r)];
      const std::span pages(schedule.pages + row.pages_at, static_cast<size_t>(row.num_pages));
      const std::span masks(schedule.masks ? schedule.masks + row.pages_at : nullptr,
                            schedule.masks ? pages.size() : 0);
      for (int64_t g = 0; g < num_kv_heads; ++g)
        if (task.head < 0 || task.head == g) entries.push_back({row.token, g, row.limit, pages, masks});
    }
  return entries;
}

}  // namespace

void store_in_pages_reference(const at::Tensor& pages, const at::Tensor& k_TGH, const at::Tensor& v_TGH,
                              std::span<const TokenSlot> tokens) {
  std::vector<int64_t> from, to;
  for (const TokenSlot& token : tokens) {
    from.push_back(token.token);
    to.push_back(token.slot);
  }
  const at::Tensor from_S = at::tensor(from, at::kLong).to(pages.device());
  store(keys_of_pages(pages, k_TGH.size(2)), values_of_pages(pages, k_TGH.size(2)),
        k_TGH.index_select(0, from_S), v_TGH.index_select(0, from_S),
        at::tensor(to, at::kLong).to(pages.device()));
}

at::Tensor paged_attention_reference(const at::Tensor& q_TNH, Optional k_TGH, Optional v_TGH,
                                     const at::Tensor& pages, const at::Tensor& work, double scale,
                                     Optional lse_TN) {
  const at::Tensor keys = keys_of_pages(pages, q_TNH.size(2)), values = values_of_pages(pages, q_TNH.size(2));
  const int64_t T = q_TNH.size(0), N = q_TNH.size(1), H = q_TNH.size(2), G = keys.size(1);
  const at::ScalarType acc = accumulator_type(q_TNH.scalar_type());
  const ScheduleView schedule(work);
  const auto on_device = [&](const std::vector<int64_t>& list) {
    return at::tensor(list, at::kLong).to(q_TNH.device());
  };
  if (k_TGH) store(keys, values, *k_TGH, *v_TGH, on_device({schedule.slots.begin(), schedule.slots.end()}));

  const at::Tensor o_TNH = at::empty({T, N, H}, q_TNH.options());
  const auto grouped = [&](const at::Tensor& x) { return x.unflatten(1, {G, N / G}); };
  const std::vector<Entry> entries = entries_of(schedule, G);
  for (size_t first = 0, last = 0; first < entries.size(); first = last) {
    // A batch has as many entries as fit in kGatherBytes. Page lists are padded to the batch's longest list.
    int64_t num_pages = 0;
    for (; last < entries.size(); ++last) {
      const int64_t longest = std::max(num_pages, static_cast<int64_t>(entries[last].pages.size()));
      const int64_t bytes = static_cast<int64_t>(last - first + 1) * longest * kPageTokens * H * 2 *
                            static_cast<int64_t>(c10::elementSize(acc));
      if (last > first && bytes > kGatherBytes) break;
      num_pages = longest;
    }
    const auto E = static_cast<int64_t>(last - first), K = num_pages * kPageTokens;
    std::vector<int64_t> tokens, heads, limits, lists, masks;
    for (size_t e = first; e < last; ++e) {
      tokens.push_back(entries[e].token);
      heads.push_back(entries[e].g);
      limits.push_back(entries[e].limit);
      lists.insert(lists.end(), entries[e].pages.begin(), entries[e].pages.end());
      lists.resize(tokens.size() * static_cast<size_t>(num_pages));
      masks.insert(masks.end(), entries[e].masks.begin(), entries[e].masks.end());
      masks.resize(lists.size(), kAllKeys);
    }
    const at::Tensor token_E = on_device(tokens), head_E = on_device(heads), limit_E = on_device(limits);
    const at::Tensor page_EB = on_device(lists).view({E, num_pages}), head_E1 = head_E.unsqueeze(1);
    const at::Tensor bit_16 = at::arange(kPageTokens, limit_E.options());
    const at::Tensor unmasked_EK =
        on_device(masks).unsqueeze(1).bitwise_right_shift(bit_16).bitwise_and(1).view({E, K});
    const at::Tensor hidden_EK =
        (at::arange(K, limit_E.options()).unsqueeze(0) >= limit_E.unsqueeze(1)).logical_or(unmasked_EK == 0);
    const at::Tensor k_EHK = keys.index({page_EB, head_E1})  // [E, B, H' / P, 16, P]
                                 .permute({0, 2, 4, 1, 3})
                                 .reshape({E, -1, K})
                                 .narrow(1, 0, H)
                                 .to(acc);
    const at::Tensor v_EKH = values
                                 .index({page_EB, head_E1})  // [E, B, 16 / P, H', P]
                                 .permute({0, 1, 2, 4, 3})
                                 .reshape({E, K, -1})
                                 .narrow(2, 0, H)
                                 .to(acc)
                                 .masked_fill(hidden_EK.unsqueeze(2), 0.0);
    const at::Tensor q = grouped(q_TNH).index({token_E, head_E}).to(acc);  // [E, N / G, H]
    const at::Tensor scores = at::matmul(q, k_EHK).mul_(scale).masked_fill(hidden_EK.unsqueeze(1), -INFINITY);
    const at::Tensor o = at::matmul(at::softmax(scores, -1), v_EKH);
    grouped(o_TNH).index_put_({token_E, head_E}, o.to(o_TNH.scalar_type()));
    if (lse_TN) grouped(*lse_TN).index_put_({token_E, head_E}, at::logsumexp(scores, -1));
  }
  return o_TNH;
}

namespace {
at::Tensor reference_op(const at::Tensor& q, Optional k, Optional v, const at::Tensor& pages,
                        const at::Tensor& work, Optional, at::IntArrayRef, double scale, Optional lse) {
  return paged_attention_reference(q, k, v, pages, work, scale, lse);
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("paged_attention_", TORCH_FN(bough::reference_op));
}
