#include <ATen/ATen.h>

#include <cmath>
#include <optional>

#include "kernels/adamw/adamw.h"
#include "kernels/common/op.h"

namespace bough {

void adamw_reference(const AdamwState& state, const AdamwStep& step) {
  const auto& weight = state.master.defined() ? state.master : state.value;
  const auto g = state.gradient * step.gradient_scale;
  state.exp_avg.mul_(step.beta1).add_(g, 1 - step.beta1);
  state.exp_avg_sq.mul_(step.beta2).add_(g.square(), 1 - step.beta2);
  const auto mean = state.exp_avg / (1 - std::pow(step.beta1, step.step));
  const auto deviation = (state.exp_avg_sq / (1 - std::pow(step.beta2, step.step))).sqrt();
  weight.mul_(1 - step.lr * step.weight_decay).sub_(mean / (deviation + step.eps), step.lr);
  if (state.master.defined()) state.value.copy_(state.master);
  state.gradient.zero_();
}

namespace {
void adamw_reference_op(const at::Tensor& value, const std::optional<at::Tensor>& master,
                        const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const at::Tensor& gradient,
                        double lr, double beta1, double beta2, double eps, double weight_decay,
                        double gradient_scale, int64_t step) {
  adamw_reference({value, master.value_or(at::Tensor()), exp_avg, exp_avg_sq, gradient},
                  {lr, beta1, beta2, eps, weight_decay, gradient_scale, step});
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("adamw_", TORCH_FN(bough::adamw_reference_op));
}
