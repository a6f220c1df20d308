#include <ATen/ops/sort.h>

#include <tuple>

#include "kernels/common/cuda_launch.h"
#include "kernels/embedding/embedding_cuda.h"

namespace bough {

namespace {
void add_embedding_gradient_op(Tensor sums_VD, Tensor tokens_T, Tensor rows_TD) {
  const Launch launch("add_embedding_gradient_", {sums_VD, tokens_T, rows_TD});
  const auto sorted = at::sort(tokens_T, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const at::Tensor &tokens = std::get<0>(sorted), &order = std::get<1>(sorted);
  dispatch_float_types(rows_TD.scalar_type(), "embedding", [&]<class T>() {
    using A = AccOf<T>;
    add_embedding_gradient_cuda(EmbeddingGradient<T, A>{.sums = mutable_data<A>(sums_VD),
                                                        .tokens = data<int64_t>(tokens),
                                                        .order = data<int64_t>(order),
                                                        .rows = data<T>(rows_TD),
                                                        .num_rows = rows_TD.size(0),
                                                        .width = rows_TD.size(1)},
                                launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CUDA, m) {
  bough::register_cuda_kernel(m, "add_embedding_gradient_", TORCH_FN(bough::add_embedding_gradient_op));
}
