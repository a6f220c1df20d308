// The CUDA kernels of page choice as torch ops.
#include <ATen/ops/empty.h>

#include "kernels/common/cuda_launch.h"
#include "kernels/page_choice/page_choice_cuda.h"

namespace bough {

namespace {
template <class Function>
void dispatch(at::ScalarType type, Function&& function) {
  switch (type) {
    case at::kFloat: return function.template operator()<float>();
    case at::kBFloat16: return function.template operator()<BFloat16Bits>();
    default: BOUGH_CHECK(false, "page choice on CUDA computes in fp32 and bf16, got ", c10::toString(type));
  }
}

void summarise_pages_op(Tensor pages, Tensor complete, bool has_extremes, int64_t head_dim,
                        Tensor summaries) {
  const Launch launch("summarise_pages", {pages, complete, summaries});
  dispatch(pages.scalar_type(), [&]<class T>() {
    summarise_pages_cuda(SummarisePagesCuda<T>{.summaries = mutable_data<T>(summaries),
                                               .keys = data<T>(pages),
                                               .complete = data<int32_t>(complete),
                                               .num_complete = complete.numel(),
                                               .num_groups = summaries.size(1),
                                               .head_dim = head_dim,
                                               .padded_dim = summaries.size(3),
                                               .has_extremes = has_extremes},
                         launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

at::Tensor choose_pages_op(Tensor strided_q, Tensor summaries, bool has_extremes, Tensor queries,
                           Tensor pages, int64_t most_pages, int64_t most_kept,
                           const std::optional<at::Tensor>& tables, const std::optional<at::Tensor>& ids) {
  const at::Tensor q = strided_q.contiguous();
  BOUGH_CHECK(tables.has_value() == ids.has_value(), "choose_pages: expected both tables and ids or neither");
  const Launch launch = ids ? Launch("choose_pages", {q, summaries, queries, pages, *tables, *ids})
                            : Launch("choose_pages", {q, summaries, queries, pages});
  const int64_t Q = queries.size(0), G = summaries.size(1);
  BOUGH_CHECK(summaries.size(3) <= kPageChoiceMaxHeadDim && queries.size(1) == 4, "choose_pages: head_dim ",
              q.size(2), " of at most ", kPageChoiceMaxHeadDim);
  const at::Tensor lists = at::empty({Q, G, most_kept}, queries.options());
  const at::Tensor scores = at::empty({Q, G, most_pages}, queries.options().dtype(at::kFloat));
  dispatch(q.scalar_type(), [&]<class T>() {
    choose_pages_cuda(
        ChoosePagesCuda<T>{.lists = mutable_data<int32_t>(lists),
                           .scores = mutable_data<float>(scores),
                           .q = data<T>(q),
                           .summaries = data<T>(summaries),
                           .pages = data<int32_t>(pages),
                           .queries = reinterpret_cast<const PageChoiceQuery*>(data<int32_t>(queries)),
                           .tables = ids ? data<int32_t>(*tables) : nullptr,
                           .ids = ids ? mutable_data<int32_t>(*ids) : nullptr,
                           .num_queries = Q,
                           .num_heads = q.size(1),
                           .num_groups = G,
                           .head_dim = q.size(2),
                           .padded_dim = summaries.size(3),
                           .most_pages = most_pages,
                           .most_kept = most_kept,
                           .has_extremes = has_extremes},
        launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return lists;
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CUDA, m) {
  bough::register_cuda_kernel(m, "summarise_pages_", TORCH_FN(bough::summarise_pages_op));
  bough::register_cuda_kernel(m, "choose_pages", TORCH_FN(bough::choose_pages_op));
}
