#include "kernels/qk_norm_rotary/qk_norm_rotary.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "kernels/common/autograd.h"
#include "kernels/common/op.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def(
      "qk_norm_rotary_forward(Tensor qkv, Tensor cos, Tensor sin, Tensor? q_norm, Tensor? k_norm, int "
      "num_heads, "
      "int num_kv_heads, float eps, float weight_offset) -> (Tensor, Tensor, Tensor)");
  m.def(
      "qk_norm_rotary_backward(Tensor d_q, Tensor d_k, Tensor d_v, Tensor qkv, Tensor cos, Tensor sin, "
      "Tensor? q_norm, "
      "Tensor? k_norm, Tensor(a!)? d_q_norm, Tensor(b!)? d_k_norm, float eps, float weight_offset) -> "
      "Tensor");
}

namespace bough {

namespace {
using OptionalTensor = std::optional<at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using ForwardOp = Three(const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                        const OptionalTensor&, int64_t, int64_t, double, double);
using BackwardOp = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                              const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, double,
                              double);

OptionalTensor value_of(const Parameter* parameter) {
  return parameter ? OptionalTensor(parameter->value) : std::nullopt;
}
// The kernels compute a norm's gradient together with the input's gradient. The gradient of a frozen norm is
// discarded.
OptionalTensor gradient_of(const Parameter* parameter) {
  if (!parameter) return std::nullopt;
  if (parameter->main_grad.defined()) return parameter->main_grad;
  const auto type = accumulator_type(parameter->value.scalar_type());
  return at::zeros_like(parameter->value, parameter->value.options().dtype(type));
}
OptionalTensor optional(const c10::IValue& value) {
  return value.toOptional<at::Tensor>();
}

struct QkNormRotaryFunction : torch::autograd::Function<QkNormRotaryFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& qkv, const QkvLayout& layout,
                               const RotaryTable& rotary, const Parameter* q_norm, const Parameter* k_norm,
                               const NormSettings& norm) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op = find_op<ForwardOp>("bough::qk_norm_rotary_forward");
    context->save_for_backward({qkv, rotary.cos, rotary.sin});
    auto& data = context->saved_data;
    data["q_norm"] = value_of(q_norm);
    data["k_norm"] = value_of(k_norm);
    data["d_q_norm"] = gradient_of(q_norm);
    data["d_k_norm"] = gradient_of(k_norm);
    data["eps"] = norm.eps;
    data["weight_offset"] = norm.weight_offset;
    auto [q, k, v] = op.call(qkv, rotary.cos, rotary.sin, value_of(q_norm), value_of(k_norm),
                             layout.num_heads, layout.num_kv_heads, norm.eps, norm.weight_offset);
    return {q, k, v};
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    static const auto op = find_op<BackwardOp>("bough::qk_norm_rotary_backward");
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    return {op.call(d_outputs[0].contiguous(), d_outputs[1].contiguous(), d_outputs[2].contiguous(), saved[0],
                    saved[1], saved[2], optional(data["q_norm"]), optional(data["k_norm"]),
                    optional(data["d_q_norm"]), optional(data["d_k_norm"]), data["eps"].toDouble(),
                    data["weight_offset"].toDouble()),
            {},
            {},
            {},
            {},
            {}};
  }
};
}  // namespace

at::Tensor rotary_frequencies(int64_t width, double theta, const at::TensorOptions& options) {
  const auto exponents =
      at::arange(0, width, 2, options.dtype(at::kLong)).to(options.dtype()) / static_cast<double>(width);
  return at::reciprocal(at::pow(at::scalar_tensor(theta, options), exponents));
}

RotaryTable make_rotary_table(const at::Tensor& positions_T, const at::Tensor& frequencies, double scale) {
  const auto angles = positions_T.to(frequencies.scalar_type()).unsqueeze(1) * frequencies.unsqueeze(0);
  if (scale == 1) return {angles.cos(), angles.sin()};
  return {angles.cos().mul_(scale), angles.sin().mul_(scale)};
}

RotaryTable make_rotary_table(const at::Tensor& positions_T, int64_t head_dim, double theta,
                              at::ScalarType acc) {
  const auto options = at::TensorOptions().dtype(acc).device(positions_T.device());
  return make_rotary_table(positions_T, rotary_frequencies(head_dim, theta, options));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> qk_norm_rotary(const at::Tensor& qkv, const QkvLayout& layout,
                                                              const RotaryTable& rotary,
                                                              const Parameter* q_norm,
                                                              const Parameter* k_norm,
                                                              const NormSettings& norm) {
  BOUGH_CHECK(qkv.dim() == 2 && qkv.is_contiguous() && qkv.size(1) == layout.width() &&
                  rotary.cos.size(0) == qkv.size(0) && rotary.cos.size(1) * 2 <= layout.head_dim &&
                  !q_norm == !k_norm,
              "qk_norm_rotary: qkv ", qkv.sizes(), ", cos ", rotary.cos.sizes(), ", head_dim ",
              layout.head_dim);
  const auto outputs = QkNormRotaryFunction::apply(qkv, layout, rotary, q_norm, k_norm, norm);
  return {outputs[0], outputs[1], outputs[2]};
}

namespace {
// Rotates x: [T, heads, H]; cos, sin: [T, r]. sign = -1 inverts the rotation.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign) {
  const int64_t pairs = cos.size(1);
  const auto parts = x.split_with_sizes({pairs, pairs, x.size(-1) - 2 * pairs}, -1);
  const auto c = cos.unsqueeze(1);
  const auto s = sin.unsqueeze(1) * sign;
  return at::cat({parts[0] * c - parts[1] * s, parts[1] * c + parts[0] * s, parts[2]}, -1);
}

at::Tensor normed(const at::Tensor& x, const std::optional<at::Tensor>& weight, const NormSettings& norm) {
  if (!weight) return x;
  return x * (x.square().mean(-1, true) + norm.eps).rsqrt() *
         (weight->to(x.scalar_type()) + norm.weight_offset);
}

at::Tensor norm_backward(const at::Tensor& d_y, const at::Tensor& x, const std::optional<at::Tensor>& weight,
                         const std::optional<at::Tensor>& d_weight, const NormSettings& norm) {
  if (!weight) return d_y;
  const auto r = (x.square().mean(-1, true) + norm.eps).rsqrt();
  const auto g = d_y * (weight->to(x.scalar_type()) + norm.weight_offset);
  d_weight->add_((d_y * x * r).sum(at::IntArrayRef{0, 1}));
  return r * (g - x * r * r * (g * x).mean(-1, true));
}
}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> qk_norm_rotary_forward_reference(
    const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
    const std::optional<at::Tensor>& q_norm, const std::optional<at::Tensor>& k_norm, int64_t num_heads,
    int64_t num_kv_heads, const NormSettings& norm) {
  const int64_t head_dim = qkv.size(1) / (num_heads + 2 * num_kv_heads);
  const auto parts = qkv.to(cos.scalar_type())
                         .view({qkv.size(0), -1, head_dim})
                         .split_with_sizes({num_heads, num_kv_heads, num_kv_heads}, 1);
  const auto type = qkv.scalar_type();
  return {rotate(normed(parts[0], q_norm, norm), cos, sin, 1).to(type),
          rotate(normed(parts[1], k_norm, norm), cos, sin, 1).to(type), parts[2].to(type).contiguous()};
}

at::Tensor qk_norm_rotary_backward_reference(
    const at::Tensor& d_q, const at::Tensor& d_k, const at::Tensor& d_v, const at::Tensor& qkv,
    const at::Tensor& cos, const at::Tensor& sin, const std::optional<at::Tensor>& q_norm,
    const std::optional<at::Tensor>& k_norm, const std::optional<at::Tensor>& d_q_norm,
    const std::optional<at::Tensor>& d_k_norm, const NormSettings& norm) {
  const auto acc = cos.scalar_type();
  const int64_t n = d_q.size(1);
  const int64_t g = d_k.size(1);
  const auto x = qkv.to(acc).view({qkv.size(0), n + 2 * g, d_q.size(2)});
  const auto d_q_in =
      norm_backward(rotate(d_q.to(acc), cos, sin, -1), x.narrow(1, 0, n), q_norm, d_q_norm, norm);
  const auto d_k_in =
      norm_backward(rotate(d_k.to(acc), cos, sin, -1), x.narrow(1, n, g), k_norm, d_k_norm, norm);
  return at::cat({d_q_in, d_k_in, d_v.to(acc)}, 1).to(qkv.scalar_type()).view(qkv.sizes());
}

namespace {
Three qk_norm_rotary_forward_op(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                                const OptionalTensor& q_norm, const OptionalTensor& k_norm, int64_t num_heads,
                                int64_t num_kv_heads, double eps, double weight_offset) {
  return qk_norm_rotary_forward_reference(qkv, cos, sin, q_norm, k_norm, num_heads, num_kv_heads,
                                          {eps, weight_offset});
}

at::Tensor qk_norm_rotary_backward_op(const at::Tensor& d_q, const at::Tensor& d_k, const at::Tensor& d_v,
                                      const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                                      const OptionalTensor& q_norm, const OptionalTensor& k_norm,
                                      const OptionalTensor& d_q_norm, const OptionalTensor& d_k_norm,
                                      double eps, double weight_offset) {
  return qk_norm_rotary_backward_reference(d_q, d_k, d_v, qkv, cos, sin, q_norm, k_norm, d_q_norm, d_k_norm,
                                           {eps, weight_offset});
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("qk_norm_rotary_forward", TORCH_FN(bough::qk_norm_rotary_forward_op));
  m.impl("qk_norm_rotary_backward", TORCH_FN(bough::qk_norm_rotary_backward_op));
}
