// The CUDA kernels of paged attention as a torch op.
#include <ATen/ops/empty_like.h>

#include "kernels/common/cuda_launch.h"
#include "kernels/paged_attention/paged_attention_cuda.h"

namespace bough {

namespace {
using Optional = const std::optional<at::Tensor>&;

template <bool kTensorCores>
at::Tensor paged_attention_op(Tensor strided_q, Optional strided_k, Optional strided_v, Tensor pages,
                              Tensor work, Optional some_parts, at::IntArrayRef capacities, double scale,
                              Optional lse) {
  BOUGH_CHECK(strided_k && strided_v && some_parts && !lse,
              "paged_attention on CUDA: expected k, v and parts, and no output for the log-sum-exp");
  const at::Tensor q = strided_q.contiguous(), k = strided_k->contiguous(), v = strided_v->contiguous();
  const at::Tensor& parts = *some_parts;
  const Launch launch("paged_attention", {q, k, v, pages, work, parts});
  const int64_t head_dim = q.size(2), num_parts = parts.numel() / (q.size(1) * (head_dim + 2));
  BOUGH_CHECK(capacities.size() == 6 && head_dim <= kPagedAttentionMaxHeadDim, "paged_attention: head_dim ",
              head_dim, " of at most ", kPagedAttentionMaxHeadDim);
  auto o = at::empty_like(q);
  const auto run = [&]<class T>() {
    paged_attention_cuda(
        PagedAttentionCuda<T>{.q = data<T>(q),
                              .k = data<T>(k),
                              .v = data<T>(v),
                              .keys = mutable_data<T>(pages),
                              .values = mutable_data<T>(pages) + pages.numel() / 2,
                              .o = mutable_data<T>(o),
                              .work = data<int32_t>(work),
                              .layout = {.max_large = capacities[0],
                                         .max_small = capacities[1],
                                         .max_rows = capacities[2],
                                         .max_merges = capacities[3],
                                         .max_tokens = capacities[4],
                                         .per_head = capacities[5] != 0},
                              // The part_sums come before the parts, because they are read as pairs and need
                              // even addresses.
                              .parts = mutable_data<float>(parts) + 2 * num_parts * q.size(1),
                              .part_sums = mutable_data<float>(parts),
                              .num_tokens = q.size(0),
                              .num_heads = q.size(1),
                              .num_groups = k.size(1),
                              .head_dim = head_dim,
                              .scale = static_cast<float>(scale),
                              .tensor_cores = kTensorCores},
        launch.stream());
  };
  switch (q.scalar_type()) {
    case at::kFloat: run.template operator()<float>(); break;
    case at::kBFloat16: run.template operator()<BFloat16Bits>(); break;
    default:
      BOUGH_CHECK(false, "paged_attention computes in fp32 and bf16, got ", c10::toString(q.scalar_type()));
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return o;
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CUDA, m) {
  bough::register_cuda_kernel(m, "paged_attention_", TORCH_FN(bough::paged_attention_op<true>),
                              TORCH_FN(bough::paged_attention_op<false>));
}
