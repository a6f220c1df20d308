#include "kernels/linear/linear.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "kernels/common/autograd.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/quantized_product/quantized_product.h"

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

void check_linear(const char* op, const at::Tensor& x_RI, const Parameter& weight) {
  BOUGH_CHECK(x_RI.dim() == 2 && weight.value.dim() == 2 && x_RI.size(1) == weight.value.size(1) &&
                  (weight.quantized() || x_RI.scalar_type() == weight.value.scalar_type()),
              op, ": x ", x_RI.sizes(), " ", x_RI.scalar_type(), ", weight ", weight.value.sizes(), " ",
              weight.value.scalar_type());
  BOUGH_CHECK(!weight.quantized() || !at::GradMode::is_enabled(), op,
              ": a quantized weight has no gradient, and a graph is being recorded");
}

at::Tensor linear_forward(const at::Tensor& x_RI, const Parameter& weight, const Parameter* bias,
                          bool batch_invariant, const std::optional<at::Tensor>& residual_RO) {
  if (weight.quantized())  // batch-invariant as it is
    return quantized_product(x_RI, weight.value, weight.scale,
                             bias ? std::optional(bias->value) : std::nullopt, residual_RO);
  const auto product = batch_invariant ? batch_invariant_product : matrix_product;
  return product(x_RI, weight.value.t(), bias ? std::optional(bias->value) : std::nullopt, residual_RO);
}

void add_linear_gradients(const at::Tensor& weight_grad_OI, const at::Tensor& bias_grad_O,
                          const at::Tensor& d_y_RO, const at::Tensor& x_RI) {
  add_matrix_product_(weight_grad_OI, d_y_RO.t(), x_RI);
  if (bias_grad_O.defined()) bias_grad_O.add_(at::sum(d_y_RO, {0}, false, bias_grad_O.scalar_type()));
}

at::Tensor linear(const at::Tensor& x_RI, const Parameter& weight, const Parameter* bias,
                  bool batch_invariant, const std::optional<at::Tensor>& residual_RO) {
  check_linear("linear", x_RI, weight);
  return LinearFunction::apply(x_RI, weight, bias, batch_invariant, residual_RO);
}

}  // namespace bough
