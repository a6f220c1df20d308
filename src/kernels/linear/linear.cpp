#include "kernels/linear/linear.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "kernels/common/autograd.h"
#include "kernels/matrix_product/matrix_product.h"

namespace bough {

namespace {
struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Parameter& weight,
                            const Parameter* bias, bool batch_invariant) {
    at::AutoDispatchBelowADInplaceOrView guard;
    context->save_for_backward({x});
    context->saved_data["weight"] = weight.value;
    context->saved_data["main_grad"] = weight.main_grad;
    if (bias) context->saved_data["bias_grad"] = bias->main_grad;
    const auto bias_value = bias ? std::optional(bias->value) : std::nullopt;
    return batch_invariant ? batch_invariant_product(x, weight.value.t(), bias_value)
                           : matrix_product(x, weight.value.t(), bias_value);
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    const auto d_y = d_outputs[0].contiguous();
    const auto x = context->get_saved_variables()[0];
    add_matrix_product_(context->saved_data["main_grad"].toTensor(), d_y.t(), x);
    if (const auto bias = context->saved_data.find("bias_grad"); bias != context->saved_data.end()) {
      const auto bias_grad = bias->second.toTensor();
      bias_grad.add_(at::sum(d_y, {0}, false, bias_grad.scalar_type()));
    }
    return {matrix_product(d_y, context->saved_data["weight"].toTensor()), {}, {}, {}};
  }
};
}  // namespace

at::Tensor linear(const at::Tensor& x_RI, const Parameter& weight, const Parameter* bias,
                  bool batch_invariant) {
  BOUGH_CHECK(x_RI.dim() == 2 && weight.value.dim() == 2 && x_RI.size(1) == weight.value.size(1) &&
                  x_RI.scalar_type() == weight.value.scalar_type(),
              "linear: x ", x_RI.sizes(), " ", x_RI.scalar_type(), ", weight ", weight.value.sizes(), " ",
              weight.value.scalar_type());
  return LinearFunction::apply(x_RI, weight, bias, batch_invariant);
}

}  // namespace bough
