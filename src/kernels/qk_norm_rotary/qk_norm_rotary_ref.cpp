#include <ATen/ATen.h>

#include "kernels/common/op.h"
#include "kernels/qk_norm_rotary/qk_norm_rotary.h"

namespace bough {

namespace {
// x: [T, heads, H]; cos, sin: [T, H/2]. sign -1 turns the rotation around.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign) {
  const auto halves = x.chunk(2, -1);
  const auto c = cos.unsqueeze(1);
  const auto s = sin.unsqueeze(1) * sign;
  return at::cat({halves[0] * c - halves[1] * s, halves[1] * c + halves[0] * s}, -1);
}

at::Tensor norm(const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps) {
  return weight ? x * (x.square().mean(-1, true) + eps).rsqrt() * weight->to(x.scalar_type()) : x;
}

at::Tensor norm_backward(const at::Tensor& d_y, const at::Tensor& x, const std::optional<at::Tensor>& weight,
                         const std::optional<at::Tensor>& d_weight, double eps) {
  if (!weight) return d_y;
  const auto r = (x.square().mean(-1, true) + eps).rsqrt();
  const auto g = d_y * weight->to(x.scalar_type());
  d_weight->add_((d_y * x * r).sum(at::IntArrayRef{0, 1}));
  return r * (g - x * r * r * (g * x).mean(-1, true));
}
}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> qk_norm_rotary_forward_reference(
    const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
    const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm, int64_t num_heads,
    int64_t num_kv_heads, double eps) {
  const int64_t head_dim = 2 * cos.size(1);
  const auto parts = qkv.to(cos.scalar_type())
                         .view({qkv.size(0), -1, head_dim})
                         .split_with_sizes({num_heads, num_kv_heads, num_kv_heads}, 1);
  const auto type = qkv.scalar_type();
  return {rotate(norm(parts[0], q_norm, eps), cos, sin, 1).to(type),
          rotate(norm(parts[1], k_norm, eps), cos, sin, 1).to(type), parts[2].to(type).contiguous()};
}

at::Tensor qk_norm_rotary_backward_reference(const at::Tensor& d_q, const at::Tensor& d_k,
                                             const at::Tensor& d_v, const at::Tensor& qkv,
                                             const at::Tensor& cos, const at::Tensor& sin,
                                             const std::optional<at::Tensor>& q_norm,
                                             const std::optional<at::Tensor>& k_norm,
                                             const std::optional<at::Tensor>& d_q_norm,
                                             const std::optional<at::Tensor>& d_k_norm, double eps) {
  const auto acc = cos.scalar_type();
  const int64_t n = d_q.size(1);
  const int64_t g = d_k.size(1);
  const auto x = qkv.to(acc).view({qkv.size(0), n + 2 * g, 2 * cos.size(1)});
  const auto d_q_in =
      norm_backward(rotate(d_q.to(acc), cos, sin, -1), x.narrow(1, 0, n), q_norm, d_q_norm, eps);
  const auto d_k_in =
      norm_backward(rotate(d_k.to(acc), cos, sin, -1), x.narrow(1, n, g), k_norm, d_k_norm, eps);
  return at::cat({d_q_in, d_k_in, d_v.to(acc)}, 1).to(qkv.scalar_type()).view(qkv.sizes());
}

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("qk_norm_rotary_forward", TORCH_FN(bough::qk_norm_rotary_forward_reference));
  m.impl("qk_norm_rotary_backward", TORCH_FN(bough::qk_norm_rotary_backward_reference));
}
