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

}  // namespace bough
