// References of the ops of page choice in tensor ops, for pages as CUDA has them: [2, B, G, 16, H]. The CPU
// does not use the ops (page_choice.cpp).
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "kernels/page_choice/page_choice.h"
#include "kernels/parameter.h"

namespace bough {

namespace {
void summarise_pages_reference(const at::Tensor& pages, const at::Tensor& complete, bool has_extremes,
                               int64_t head_dim, const at::Tensor& summaries) {
  const at::Tensor complete_C = complete.to(at::kLong);
  const at::Tensor k_CGTH =
      pages.select(0, 0).index_select(0, complete_C).to(accumulator_type(pages.scalar_type()));
  const at::Tensor vectors =
      has_extremes ? at::stack({k_CGTH.amin(2), k_CGTH.amax(2)}, 2) : k_CGTH.mean(2, /*keepdim=*/true);
  summaries.index_copy_(
      0, complete_C,
      at::constant_pad_nd(vectors, {0, summaries.size(3) - head_dim}, 0).to(summaries.scalar_type()));
}

// Most elements of the summaries that choose_pages_reference() gathers at once.
constexpr int64_t kMostGathered = int64_t{1} << 26;

// Writes the ids of the pages that the queries keep to their tables. Places beyond a query's table repeat its
// last place, so that all tables have the same length.
void fill_tables(const at::Tensor& lists_QGK, const at::Tensor& queries, const at::Tensor& pages,
                 const at::Tensor& tables, const at::Tensor& ids) {
  const int64_t Q = lists_QGK.size(0), G = lists_QGK.size(1), P = lists_QGK.size(2) + 3;
  const auto field = [&](int64_t which) { return queries.select(1, which).view({Q, 1, 1}); };
  const at::Tensor last = field(3) + 2;
  const at::Tensor place_QGP = at::minimum(at::arange(P, queries.options()), last).expand({Q, G, P});
  const at::Tensor index_QGP = at::constant_pad_nd(lists_QGK, {1, 2}, 0).gather(2, place_QGP.to(at::kLong));
  const at::Tensor kept_QGP =
      at::where(place_QGP >= last - 1, field(2) - 1 - last + place_QGP, index_QGP) + field(1);
  ids.index_put_({(tables.view({Q, G, 1}) + place_QGP).view(-1).to(at::kLong)},
                 pages.index_select(0, kept_QGP.reshape(-1)));
}

// Queries that have fewer candidates than the longest get candidates that are never kept.
at::Tensor choose_pages_reference(const at::Tensor& q_TNH, const at::Tensor& summaries, bool /*has_extremes*/,
                                  const at::Tensor& queries, const at::Tensor& pages, int64_t most_pages,
                                  int64_t most_kept, const std::optional<at::Tensor>& tables,
                                  const std::optional<at::Tensor>& ids) {
  const int64_t Q = queries.size(0), G = summaries.size(1), H = q_TNH.size(2), C = most_pages - 3;
  const auto type = accumulator_type(q_TNH.scalar_type());
  const at::Tensor number_C = at::arange(C, queries.options());
  std::vector<at::Tensor> lists;
  const int64_t rows = std::clamp<int64_t>(kMostGathered / (C * summaries.stride(0)), 1, Q);
  for (int64_t begin = 0; begin < Q; begin += rows) {
    const at::Tensor some = queries.narrow(0, begin, std::min(rows, Q - begin));  // PageChoiceQuery records
    const auto field = [&](int64_t which) { return some.narrow(1, which, 1); };
    const at::Tensor q_QGH = q_TNH.index_select(0, some.select(1, 0)).to(type).unflatten(1, {G, -1}).mean(2);
    const at::Tensor is_candidate_QC = number_C < field(2) - 3;
    const at::Tensor page_QC = at::where(is_candidate_QC, field(1) + 1 + number_C, 0).view(-1).to(at::kLong);
    const at::Tensor s_QCGVH = summaries.narrow(3, 0, H)
                                   .index_select(0, pages.index_select(0, page_QC))
                                   .to(type)
                                   .unflatten(0, {-1, C});
    const at::Tensor score_QCG = (s_QCGVH * q_QGH.unsqueeze(1).unsqueeze(3)).amax(3).sum(-1);
    const at::Tensor has_score_QCG =
        is_candidate_QC.unsqueeze(2).logical_and(score_QCG.isnan().logical_not());
    // NaN has no order, so it becomes -infinity. A stable sort keeps the first of equal pages.
    const at::Tensor order_QCG = at::argsort(score_QCG.masked_fill(has_score_QCG.logical_not(), -INFINITY),
                                             /*stable=*/true, /*dim=*/1, /*descending=*/true);
    const at::Tensor rank_K = at::arange(most_kept, queries.options()).view({1, -1, 1});
    const at::Tensor kept_QKG =
        order_QCG.narrow(1, 0, most_kept).masked_fill(rank_K >= field(3).unsqueeze(2), C);
    lists.push_back(std::get<0>(kept_QKG.sort(1)).add(1).transpose(1, 2).to(at::kInt));
  }
  at::Tensor lists_QGK = at::cat(lists).contiguous();
  if (ids) fill_tables(lists_QGK, queries, pages, *tables, *ids);
  return lists_QGK;
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("summarise_pages_", TORCH_FN(bough::summarise_pages_reference));
  m.impl("choose_pages", TORCH_FN(bough::choose_pages_reference));
}
