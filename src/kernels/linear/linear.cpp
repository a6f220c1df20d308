#include "kernels/linear/linear.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "kernels/common/autograd.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/quantized_product/quantized_product.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/swiglu/swiglu.h"

namespace bough {

namespace {
struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Parameter& weight,
                            const Parameter* bias, bool batch_invariant,
                            const std::optional<at::Tensor>& residual) {
    at::AutoDispatchBelowADInplaceOrView guard;
    context->save_for_backward({x});
    context->saved_data["weight"] = weight.value;
    context->saved_data["main_grad"] = weight.main_grad;
    context->saved_data["bias_grad"] = bias ? bias->main_grad : at::Tensor();
    context->saved_data["has_residual"] = residual.has_value();
    return linear_forward(x, weight, bias, batch_invariant, residual);
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    const auto d_y = d_outputs[0].contiguous();
    auto& data = context->saved_data;
    add_linear_gradients(data["main_grad"].toTensor(), data["bias_grad"].toTensor(), d_y,
                         context->get_saved_variables()[0]);
    return {matrix_product(d_y, data["weight"].toTensor()),
            {},
            {},
            {},
            data["has_residual"].toBool() ? d_y : at::Tensor()};
  }
};
}  // namespace

void check_linear(const char* op, const at::Tensor& x_RK, const Parameter& weight) {
  BOUGH_CHECK(x_RK.dim() == 2 && weight.value.dim() == 2 && x_RK.size(1) == weight.value.size(1) &&
                  (weight.quantized() || x_RK.scalar_type() == weight.value.scalar_type()),
              op, ": x ", x_RK.sizes(), " ", x_RK.scalar_type(), ", weight ", weight.value.sizes(), " ",
              weight.value.scalar_type());
  BOUGH_CHECK(!weight.quantized() || !at::GradMode::is_enabled(), op,
              ": a quantized weight has no gradient, and a graph is being recorded");
}

at::Tensor linear_forward(const at::Tensor& x_RK, const Parameter& weight, const Parameter* bias,
                          bool batch_invariant, const std::optional<at::Tensor>& residual_RO) {
  if (weight.quantized())  // batch-invariant as it is
    return quantized_product(x_RK, weight.value, weight.scale,
                             bias ? std::optional(bias->value) : std::nullopt, residual_RO);
  const auto product = batch_invariant ? batch_invariant_product : matrix_product;
  return product(x_RK, weight.value.t(), bias ? std::optional(bias->value) : std::nullopt, residual_RO);
}

void add_linear_gradients(const at::Tensor& weight_grad_OK, const at::Tensor& bias_grad_O,
                          const at::Tensor& d_y_RO, const at::Tensor& x_RK) {
  add_matrix_product_(weight_grad_OK, d_y_RO.t(), x_RK);
  if (bias_grad_O.defined()) bias_grad_O.add_(at::sum(d_y_RO, {0}, false, bias_grad_O.scalar_type()));
}

at::Tensor linear(const at::Tensor& x_RK, const Parameter& weight, const Parameter* bias,
                  bool batch_invariant, const std::optional<at::Tensor>& residual_RO) {
  check_linear("linear", x_RK, weight);
  return LinearFunction::apply(x_RK, weight, bias, batch_invariant, residual_RO);
}

namespace {
struct NormLinearFunction : torch::autograd::Function<NormLinearFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const Parameter& norm,
                               const NormSettings& settings, const Parameter& weight, const Parameter* bias,
                               bool batch_invariant) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [h, rstd] = rms_norm_forward(x, norm.value, settings);
    context->save_for_backward({x, rstd});
    context->set_materialize_grads(false);
    auto& data = context->saved_data;
    data["norm"] = norm.value;
    data["norm_grad"] = norm.main_grad;
    data["weight_offset"] = settings.weight_offset;
    data["weight"] = weight.value;
    data["weight_grad"] = weight.main_grad;
    data["bias_grad"] = bias ? bias->main_grad : at::Tensor();
    return {linear_forward(h, weight, bias, batch_invariant), x.detach()};
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    const auto& d_residual = d_outputs[1];
    // Where no gradient came through y, d_x is the residual's alone.
    if (!d_outputs[0].defined()) return {d_residual, {}, {}, {}, {}, {}};
    const auto d_y = d_outputs[0].contiguous();
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const auto d_h = matrix_product(d_y, data["weight"].toTensor());
    const auto d_x = rms_norm_backward(
        {.d_y = d_h,
         .x = saved[0],
         .weight_D = data["norm"].toTensor(),
         .rstd = saved[1],
         .residual = d_residual.defined() ? std::optional(d_residual.contiguous()) : std::nullopt,
         .d_weight_D = data["norm_grad"].toTensor(),
         .y = d_h,
         .weight_offset = data["weight_offset"].toDouble()});
    const auto& h = d_h;  // overwritten
    add_linear_gradients(data["weight_grad"].toTensor(), data["bias_grad"].toTensor(), d_y, h);
    return {d_x, {}, {}, {}, {}, {}};
  }
};
}  // namespace

NormLinearOutput norm_linear(const at::Tensor& x_RD, const Parameter& norm, const NormSettings& settings,
                             const Parameter& weight, const Parameter* bias, bool batch_invariant) {
  check_linear("norm_linear", x_RD, weight);
  const auto outputs = NormLinearFunction::apply(x_RD, norm, settings, weight, bias, batch_invariant);
  return {outputs[0], outputs[1]};
}

namespace {
struct MlpFunction : torch::autograd::Function<MlpFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_TD, const MlpParameters& parameters,
                            bool batch_invariant) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto& p = parameters;
    auto h_TD = x_TD;
    at::Tensor rstd;
    if (p.norm) std::tie(h_TD, rstd) = rms_norm_forward(x_TD, p.norm->value, p.norm_settings);
    const auto gate_up_TF2 = linear_forward(h_TD, p.gate_up, p.gate_up_bias, batch_invariant);
    h_TD.reset();
    context->save_for_backward({x_TD, rstd, gate_up_TF2});
    auto& data = context->saved_data;
    data["norm"] = p.norm ? p.norm->value : at::Tensor();
    data["norm_grad"] = p.norm ? p.norm->main_grad : at::Tensor();
    data["weight_offset"] = p.norm_settings.weight_offset;
    data["activation"] = static_cast<int64_t>(p.activation);
    data["gate_up"] = p.gate_up.value;
    data["gate_up_grad"] = p.gate_up.main_grad;
    data["gate_up_bias_grad"] = p.gate_up_bias ? p.gate_up_bias->main_grad : at::Tensor();
    data["down"] = p.down.value;
    data["down_grad"] = p.down.main_grad;
    data["down_bias_grad"] = p.down_bias ? p.down_bias->main_grad : at::Tensor();
    data["residual"] = p.residual;
    return linear_forward(swiglu_forward(gate_up_TF2, p.activation), p.down, p.down_bias, batch_invariant,
                          p.residual ? std::optional(x_TD) : std::nullopt);
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    const auto d_y_TD = d_outputs[0].contiguous();
    const auto saved = context->get_saved_variables();
    const auto &x_TD = saved[0], &rstd = saved[1], &gate_up_TF2 = saved[2];
    auto& data = context->saved_data;
    const auto gradient = [&](const char* name) { return data[name].toTensor(); };
    const auto residual_TD = data["residual"].toBool() ? std::optional(d_y_TD) : std::nullopt;
    {
      const auto d_a_TF = matrix_product(d_y_TD, data["down"].toTensor());
      swiglu_backward(d_a_TF, gate_up_TF2, /*y_TF=*/d_a_TF, /*d_gate_up_TF2=*/gate_up_TF2,
                      static_cast<GateActivation>(data["activation"].toInt()));
      gate_up_TF2.unsafeGetTensorImpl()->bump_version();  // what was saved is no more
      const auto& a_TF = d_a_TF;
      add_linear_gradients(gradient("down_grad"), gradient("down_bias_grad"), d_y_TD, a_TF);
    }
    const auto& d_gate_up_TF2 = gate_up_TF2;
    const auto& gate_up = data["gate_up"].toTensor();
    if (!rstd.defined()) {
      const auto d_x_TD = matrix_product(d_gate_up_TF2, gate_up, std::nullopt, residual_TD);
      add_linear_gradients(gradient("gate_up_grad"), gradient("gate_up_bias_grad"), d_gate_up_TF2, x_TD);
      return {d_x_TD, {}, {}};
    }
    const auto d_h_TD = matrix_product(d_gate_up_TF2, gate_up);
    const auto d_x_TD = rms_norm_backward({.d_y = d_h_TD,
                                           .x = x_TD,
                                           .weight_D = data["norm"].toTensor(),
                                           .rstd = rstd,
                                           .residual = residual_TD,
                                           .d_weight_D = gradient("norm_grad"),
                                           .y = d_h_TD,
                                           .weight_offset = data["weight_offset"].toDouble()});
    const auto& h_TD = d_h_TD;
    add_linear_gradients(gradient("gate_up_grad"), gradient("gate_up_bias_grad"), d_gate_up_TF2, h_TD);
    return {d_x_TD, {}, {}};
  }
};
}  // namespace

at::Tensor mlp(const at::Tensor& x_TD, const MlpParameters& parameters, bool batch_invariant) {
  check_linear("mlp", x_TD, parameters.gate_up);
  const auto &gate_up = parameters.gate_up.value, &down = parameters.down.value;
  BOUGH_CHECK(down.dim() == 2 && down.size(0) == x_TD.size(1) && gate_up.size(0) == 2 * down.size(1) &&
                  down.scalar_type() == gate_up.scalar_type(),
              "mlp: x ", x_TD.sizes(), " ", x_TD.scalar_type(), ", gate_up ", gate_up.sizes(), ", down ",
              down.sizes(), " ", down.scalar_type());
  return MlpFunction::apply(x_TD, parameters, batch_invariant);
}

}  // namespace bough
