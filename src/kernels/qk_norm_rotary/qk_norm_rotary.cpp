#include "kernels/qk_norm_rotary/qk_norm_rotary.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "kernels/common/autograd.h"
#include "kernels/common/op.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def(
      "qk_norm_rotary_forward(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_norm, Tensor? k_norm, int "
      "num_heads, "
      "int num_kv_heads, float eps) -> (Tensor, Tensor, Tensor)");
  m.def(
      "qk_norm_rotary_backward(Tensor d_q, Tensor d_k, Tensor d_v, Tensor qkv, Tensor cos, Tensor sin, "
      "Tensor? q_norm, "
      "Tensor? k_norm, Tensor(a!)? d_q_norm, Tensor(b!)? d_k_norm, float eps) -> Tensor");
}

namespace bough {

namespace {
using OptionalTensor = std::optional<at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using ForwardOp = Three(const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                        const OptionalTensor&, int64_t, int64_t, double);
using BackwardOp = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, double);

OptionalTensor value_of(const Parameter* parameter) {
  return parameter ? OptionalTensor(parameter->value) : std::nullopt;
}
OptionalTensor optional(const c10::IValue& value) {
  return value.toOptional<at::Tensor>();
}

struct QkNormRotaryFunction : torch::autograd::Function<QkNormRotaryFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& qkv, const QkvLayout& layout,
                               const RotaryTable& rotary, const Parameter* q_norm, const Parameter* k_norm,
                               double eps) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = find_op<ForwardOp>("bough::qk_norm_rotary_forward");
    context->save_for_backward({qkv, rotary.cos, rotary.sin});
    auto& data = context->saved_data;
    data["q_norm"] = value_of(q_norm);
    data["k_norm"] = value_of(k_norm);
    data["d_q_norm"] = q_norm ? OptionalTensor(q_norm->main_grad) : std::nullopt;
    data["d_k_norm"] = k_norm ? OptionalTensor(k_norm->main_grad) : std::nullopt;
    data["eps"] = eps;
    auto [q, k, v] = op.call(qkv, rotary.cos, rotary.sin, value_of(q_norm), value_of(k_norm),
                             layout.num_heads, layout.num_kv_heads, eps);
    return {q, k, v};
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    static const auto op = find_op<BackwardOp>("bough::qk_norm_rotary_backward");
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    return {op.call(d_outputs[0].contiguous(), d_outputs[1].contiguous(), d_outputs[2].contiguous(), saved[0],
                    saved[1], saved[2], optional(data["q_norm"]), optional(data["k_norm"]),
                    optional(data["d_q_norm"]), optional(data["d_k_norm"]), data["eps"].toDouble()),
            {},
            {},
            {},
            {},
            {}};
  }
};
}  // namespace

RotaryTable make_rotary_table(const at::Tensor& positions_T, int64_t head_dim, double theta,
                              at::ScalarType acc) {
  const auto options = at::TensorOptions().dtype(acc).device(positions_T.device());
  const auto exponents =
      at::arange(0, head_dim, 2, at::TensorOptions().dtype(at::kLong).device(positions_T.device())).to(acc) /
      static_cast<double>(head_dim);
  const auto inverse_frequency = at::reciprocal(at::pow(at::scalar_tensor(theta, options), exponents));
  const auto angles = positions_T.to(acc).unsqueeze(1) * inverse_frequency.unsqueeze(0);
  return {angles.cos(), angles.sin()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> qk_norm_rotary(const at::Tensor& qkv, const QkvLayout& layout,
                                                              const RotaryTable& rotary,
                                                              const Parameter* q_norm,
                                                              const Parameter* k_norm, double eps) {
  BOUGH_CHECK(qkv.dim() == 2 && qkv.is_contiguous() && qkv.size(1) == layout.width() &&
                  rotary.cos.size(0) == qkv.size(0) && rotary.cos.size(1) * 2 == layout.head_dim &&
                  !q_norm == !k_norm,
              "qk_norm_rotary: qkv ", qkv.sizes(), ", cos ", rotary.cos.sizes(), ", head_dim ",
              layout.head_dim);
  const auto outputs = QkNormRotaryFunction::apply(qkv, layout, rotary, q_norm, k_norm, eps);
  return {outputs[0], outputs[1], outputs[2]};
}

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
