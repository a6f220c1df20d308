#include "kernels/norm_linear/norm_linear.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "kernels/common/autograd.h"
#include "kernels/linear/linear.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/rms_norm/rms_norm.h"

namespace bough {

namespace {
struct NormLinearFunction : torch::autograd::Function<NormLinearFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const Parameter& norm,
                               double eps, const Parameter& weight, const Parameter* bias,
                               bool batch_invariant) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [h, rstd] = rms_norm_forward(x, norm.value, eps);
    context->save_for_backward({x, rstd});
    context->set_materialize_grads(false);
    auto& data = context->saved_data;
    data["norm"] = norm.value;
    data["norm_grad"] = norm.main_grad;
    data["weight"] = weight.value;
    data["weight_grad"] = weight.main_grad;
    data["bias_grad"] = bias ? bias->main_grad : at::Tensor();
    return {linear_forward(h, weight, bias, batch_invariant), x.detach()};
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    const auto& d_residual = d_outputs[1];
    // Where nothing came through y there is nothing but the residual's.
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
         .y = d_h});
    const auto& h = d_h;  // overwritten
    add_linear_gradients(data["weight_grad"].toTensor(), data["bias_grad"].toTensor(), d_y, h);
    return {d_x, {}, {}, {}, {}, {}};
  }
};
}  // namespace

NormLinearOutput norm_linear(const at::Tensor& x_RD, const Parameter& norm, double eps,
                             const Parameter& weight, const Parameter* bias, bool batch_invariant) {
  check_linear("norm_linear", x_RD, weight);
  const auto outputs = NormLinearFunction::apply(x_RD, norm, eps, weight, bias, batch_invariant);
  return {outputs[0], outputs[1]};
}

}  // namespace bough
