#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <tuple>

#include "kernels/common/cuda_launch.h"
#include "kernels/experts/experts_cuda.h"

namespace bough {

namespace {
std::tuple<at::Tensor, at::Tensor, at::Tensor> sort_pairs_op(Tensor experts_TK, int64_t num_experts) {
  const Launch launch("sort_pairs", {experts_TK});
  const auto pairs_P = at::empty({experts_TK.numel()}, experts_TK.options());
  const auto places_TK = at::empty_like(experts_TK);
  const auto ends_E = at::empty({num_experts}, experts_TK.options().dtype(at::kInt));
  sort_pairs_cuda(mutable_data<int64_t>(pairs_P), mutable_data<int64_t>(places_TK),
                  mutable_data<int32_t>(ends_E), data<int64_t>(experts_TK), experts_TK.numel(), num_experts,
                  launch.stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {pairs_P, places_TK, ends_E};
}

// libtorch's kernels for compute capability 9 and 10 sum in fp32 and read the ends on the device. On other
// GPUs libtorch waits for the ends.
at::Tensor grouped_product_op(Tensor a_PK, Tensor weight, Tensor ends_E, bool is_transposed) {
  const Launch launch("grouped_product", {a_PK, weight, ends_E});
  const auto weight_EOK = weight.view({ends_E.size(0), -1, weight.size(1)});
  if (a_PK.size(0) == 0) return at::empty({0, weight_EOK.size(is_transposed ? 1 : 2)}, a_PK.options());
  return at::_grouped_mm(a_PK, is_transposed ? weight_EOK.transpose(1, 2) : weight_EOK, ends_E);
}

at::Tensor add_weighted_rows_op(Tensor rows_PD, Tensor places_TK, const OptionalTensor& weights_TK,
                                const OptionalTensor& residual_TD) {
  const Launch launch("add_weighted_rows", with_defined({rows_PD, places_TK}, {weights_TK, residual_TD}));
  const auto y_TD = at::empty({places_TK.size(0), rows_PD.size(1)}, rows_PD.options());
  dispatch_float_types(rows_PD.scalar_type(), "add_weighted_rows", [&]<class T>() {
    using A = AccOf<T>;
    add_weighted_rows_cuda<T, A>({.y = mutable_data<T>(y_TD),
                                  .rows = data<T>(rows_PD),
                                  .places = data<int64_t>(places_TK),
                                  .weights = optional_data<A>(weights_TK),
                                  .residual = optional_data<T>(residual_TD),
                                  .num_tokens = places_TK.size(0),
                                  .num_chosen = places_TK.size(1),
                                  .width = rows_PD.size(1)},
                                 launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y_TD;
}

at::Tensor weigh_rows_op_(Tensor a_PF, Tensor d_gate_up_PF2, Tensor d_a_PF, Tensor weights_P) {
  const Launch launch("weigh_rows_", {a_PF, d_gate_up_PF2, d_a_PF, weights_P});
  const auto d_weights_P = at::empty_like(weights_P);
  dispatch_float_types(a_PF.scalar_type(), "weigh_rows_", [&]<class T>() {
    using A = AccOf<T>;
    weigh_rows_cuda<T, A>(mutable_data<A>(d_weights_P), mutable_data<T>(a_PF), mutable_data<T>(d_gate_up_PF2),
                          data<T>(d_a_PF), data<A>(weights_P), a_PF.size(0), a_PF.size(1), launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return d_weights_P;
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CUDA, m) {
  bough::register_cuda_kernel(m, "sort_pairs", TORCH_FN(bough::sort_pairs_op));
  bough::register_cuda_kernel(m, "grouped_product", TORCH_FN(bough::grouped_product_op));
  bough::register_cuda_kernel(m, "add_weighted_rows", TORCH_FN(bough::add_weighted_rows_op));
  bough::register_cuda_kernel(m, "weigh_rows_", TORCH_FN(bough::weigh_rows_op_));
}
