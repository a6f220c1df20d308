#include "kernels/tree_attention/tree_attention_cpu.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include "kernels/common/avx.h"
#include "kernels/matrix_product/matrix_product.h"

namespace bough {

namespace {
enum class Way { kBf16, kFp32, kReference };

Way way(at::ScalarType type) {
  if (type == at::kBFloat16 && !copies_to_fp32(type)) return Way::kBf16;
  return (type == at::kFloat || type == at::kBFloat16) && has_avx() ? Way::kFp32 : Way::kReference;
}

std::tuple<at::Tensor, at::Tensor> forward_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                               const at::Tensor& k_stack, const at::Tensor& v_stack,
                                               const at::Tensor& end_local,
                                               const std::optional<at::Tensor>& /*spans*/, double scale) {
  const TreeAttentionInput in{q, k, v, k_stack, v_stack, end_local, scale};
  if (way(q.scalar_type()) == Way::kReference) {
    auto out = tree_attention_forward_reference(in);
    return {out.o_TNH, out.lse_TN};
  }
  auto o = at::empty_like(q);
  auto lse = at::empty({q.size(0), q.size(1)}, q.options().dtype(at::kFloat));
  way(q.scalar_type()) == Way::kBf16 ? tree_attention_forward_bf16(in, o, lse)
                                     : tree_attention_forward_fp32(in, o, lse);
  return {o, lse};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_cpu(
    const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& k_stack, const at::Tensor& v_stack, const at::Tensor& end_local,
    const std::optional<at::Tensor>& /*spans*/, const at::Tensor& o, const at::Tensor& lse, double scale,
    const at::Tensor& d_k_stack, const at::Tensor& d_v_stack) {
  const TreeAttentionInput in{q, k, v, k_stack, v_stack, end_local, scale};
  const auto backward = way(q.scalar_type()) == Way::kBf16   ? tree_attention_backward_bf16
                        : way(q.scalar_type()) == Way::kFp32 ? tree_attention_backward_fp32
                                                             : tree_attention_backward_reference;
  auto d = backward(in, {o, lse}, d_o, d_k_stack, d_v_stack);
  return {d.d_q_TNH, d.d_k_TGH, d.d_v_TGH};
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("tree_attention_forward", TORCH_FN(bough::forward_cpu));
  m.impl("tree_attention_backward", TORCH_FN(bough::backward_cpu));
}
