#include "kernels/mlp/mlp.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "kernels/common/autograd.h"
#include "kernels/linear/linear.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/swiglu/swiglu.h"

namespace bough {

namespace {
struct MlpFunction : torch::autograd::Function<MlpFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x_TD, const MlpParameters& parameters,
                            bool batch_invariant) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto& [norm, gate_up, down, eps] = parameters;
    auto [h_TD, rstd] = rms_norm_forward(x_TD, norm.value, eps);
    const auto gate_up_TF2 = linear_forward(h_TD, gate_up, nullptr, batch_invariant);
    h_TD.reset();
    context->save_for_backward({x_TD, rstd, gate_up_TF2});
    auto& data = context->saved_data;
    data["norm"] = norm.value;
    data["norm_grad"] = norm.main_grad;
    data["gate_up"] = gate_up.value;
    data["gate_up_grad"] = gate_up.main_grad;
    data["down"] = down.value;
    data["down_grad"] = down.main_grad;
    return linear_forward(swiglu_forward(gate_up_TF2), down, nullptr, batch_invariant, x_TD);
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    const auto d_y_TD = d_outputs[0].contiguous();
    const auto saved = context->get_saved_variables();
    const auto &x_TD = saved[0], &rstd = saved[1], &gate_up_TF2 = saved[2];
    auto& data = context->saved_data;
    {
      const auto d_a_TF = matrix_product(d_y_TD, data["down"].toTensor());
      swiglu_backward(d_a_TF, gate_up_TF2, /*y_TF=*/d_a_TF, /*d_gate_up_TF2=*/gate_up_TF2);
      gate_up_TF2.unsafeGetTensorImpl()->bump_version();  // what was saved is no more
      const auto& a_TF = d_a_TF;
      add_matrix_product_(data["down_grad"].toTensor(), d_y_TD.t(), a_TF);
    }
    const auto& d_gate_up_TF2 = gate_up_TF2;
    const auto d_h_TD = matrix_product(d_gate_up_TF2, data["gate_up"].toTensor());
    const auto d_x_TD = rms_norm_backward({.d_y = d_h_TD,
                                           .x = x_TD,
                                           .weight_D = data["norm"].toTensor(),
                                           .rstd = rstd,
                                           .residual = d_y_TD,
                                           .d_weight_D = data["norm_grad"].toTensor(),
                                           .y = d_h_TD});
    const auto& h_TD = d_h_TD;
    add_matrix_product_(data["gate_up_grad"].toTensor(), d_gate_up_TF2.t(), h_TD);
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
