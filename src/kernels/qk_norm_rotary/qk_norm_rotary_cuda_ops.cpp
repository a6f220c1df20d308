#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <tuple>

#include "kernels/common/cuda_launch.h"
#include "kernels/qk_norm_rotary/qk_norm_rotary.h"
#include "kernels/qk_norm_rotary/qk_norm_rotary_cuda.h"

namespace bough {

namespace {
template <class T>
QkNormRotaryInput<T, AccOf<T>> qk_input(Tensor qkv, Tensor cos, Tensor sin, const OptionalTensor& q_norm,
                                        const OptionalTensor& k_norm, const QkvLayout& layout,
                                        const NormSettings& norm) {
  return {.qkv = data<T>(qkv),
          .cos = data<AccOf<T>>(cos),
          .sin = data<AccOf<T>>(sin),
          .q_norm = optional_data<T>(q_norm),
          .k_norm = optional_data<T>(k_norm),
          .num_tokens = qkv.size(0),
          .num_heads = layout.num_heads,
          .num_kv_heads = layout.num_kv_heads,
          .head_dim = layout.head_dim,
          .num_pairs = cos.size(1),
          .eps = static_cast<AccOf<T>>(norm.eps),
          .weight_offset = static_cast<AccOf<T>>(norm.weight_offset)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> qk_norm_rotary_forward_op(
    Tensor qkv, Tensor cos, Tensor sin, const OptionalTensor& q_norm, const OptionalTensor& k_norm,
    int64_t num_heads, int64_t num_kv_heads, double eps, double weight_offset) {
  const Launch launch("qk_norm_rotary", with_defined({qkv, cos, sin}, {q_norm, k_norm}));
  const int64_t head_dim = qkv.size(1) / (num_heads + 2 * num_kv_heads);
  auto q = at::empty({qkv.size(0), num_heads, head_dim}, qkv.options());
  auto k = at::empty({qkv.size(0), num_kv_heads, head_dim}, qkv.options());
  auto v = at::empty_like(k);
  dispatch_float_types(qkv.scalar_type(), "qk_norm_rotary", [&]<class T>() {
    const auto input =
        qk_input<T>(qkv, cos, sin, q_norm, k_norm, {num_heads, num_kv_heads, head_dim}, {eps, weight_offset});
    qk_norm_rotary_forward_cuda(input, mutable_data<T>(q), mutable_data<T>(k), mutable_data<T>(v),
                                launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {q, k, v};
}

at::Tensor qk_norm_rotary_backward_op(Tensor d_q, Tensor d_k, Tensor d_v, Tensor qkv, Tensor cos, Tensor sin,
                                      const OptionalTensor& q_norm, const OptionalTensor& k_norm,
                                      const OptionalTensor& d_q_norm, const OptionalTensor& d_k_norm,
                                      double eps, double weight_offset) {
  const Launch launch("qk_norm_rotary",
                      with_defined({qkv, cos, sin, d_q, d_k, d_v}, {q_norm, k_norm, d_q_norm, d_k_norm}));
  const int64_t head_dim = d_q.size(2);
  const int64_t num_heads = d_q.size(1);
  const int64_t num_kv_heads = d_k.size(1);
  auto d_qkv = at::empty_like(qkv);
  OptionalTensor partial;
  if (q_norm) {
    const int64_t limit = qk_norm_rotary_max_head_dim(static_cast<int64_t>(cos.element_size()));
    BOUGH_CHECK(d_q_norm && d_k_norm && head_dim <= limit, "qk_norm_rotary: head_dim ", head_dim,
                " of at most ", limit, ", gradients of the norms ", d_q_norm ? "given" : "missing");
    partial = at::empty({qk_norm_rotary_num_parts(qkv.size(0), num_heads, num_kv_heads), 2, head_dim},
                        cos.options());
  }
  dispatch_float_types(qkv.scalar_type(), "qk_norm_rotary", [&]<class T>() {
    using A = AccOf<T>;
    const auto input =
        qk_input<T>(qkv, cos, sin, q_norm, k_norm, {num_heads, num_kv_heads, head_dim}, {eps, weight_offset});
    qk_norm_rotary_backward_cuda(input,
                                 QkNormRotaryGradient<T, A>{.d_q = data<T>(d_q),
                                                            .d_k = data<T>(d_k),
                                                            .d_v = data<T>(d_v),
                                                            .d_qkv = mutable_data<T>(d_qkv),
                                                            .d_q_norm = optional_mutable_data<A>(d_q_norm),
                                                            .d_k_norm = optional_mutable_data<A>(d_k_norm),
                                                            .partial = optional_mutable_data<A>(partial)},
                                 launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return d_qkv;
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CUDA, m) {
  bough::register_cuda_kernel(m, "qk_norm_rotary_forward", TORCH_FN(bough::qk_norm_rotary_forward_op));
  bough::register_cuda_kernel(m, "qk_norm_rotary_backward", TORCH_FN(bough::qk_norm_rotary_backward_op));
}
