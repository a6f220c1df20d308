#include "kernels/adamw/adamw.h"

#include <optional>

#include "base/error.h"
#include "kernels/common/op.h"
#include "kernels/parameter.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def(
      "adamw_(Tensor(a!) value, Tensor(b!)? master, Tensor(c!) exp_avg, Tensor(d!) exp_avg_sq, Tensor(e!) "
      "gradient, "
      "float lr, float beta1, float beta2, float eps, float weight_decay, float gradient_scale, int step) -> "
      "()");
}

namespace bough {

void adamw(const AdamwState& state, const AdamwStep& step) {
  const auto type = state.value.scalar_type();
  const auto acc = accumulator_type(type);
  BOUGH_CHECK(state.master.defined() == (type != acc), "adamw: value ", type, ", master ",
              state.master.defined() ? "given" : "none");
  const auto fits = [&](const at::Tensor& x, at::ScalarType expected) {
    return x.is_contiguous() && x.sizes() == state.value.sizes() && x.scalar_type() == expected;
  };
  BOUGH_CHECK(fits(state.value, type) && (!state.master.defined() || fits(state.master, acc)),
              "adamw: value ", state.value.sizes());
  BOUGH_CHECK(fits(state.exp_avg, acc) && fits(state.exp_avg_sq, acc) && fits(state.gradient, acc),
              "adamw: value ", state.value.sizes(), ", moments ", state.exp_avg.sizes(), " and ",
              state.exp_avg_sq.sizes(), ", gradient ", state.gradient.sizes(), " ",
              state.gradient.scalar_type());
  BOUGH_CHECK(step.step >= 1 && step.beta1 < 1 && step.beta2 < 1, "adamw: step ", step.step, ", betas ",
              step.beta1, " ", step.beta2);
  static const auto op =
      find_op<void(const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&,
                   const at::Tensor&, double, double, double, double, double, double, int64_t)>(
          "bough::adamw_");
  std::optional<at::Tensor> master;
  if (state.master.defined()) master = state.master;
  op.call(state.value, master, state.exp_avg, state.exp_avg_sq, state.gradient, step.lr, step.beta1,
          step.beta2, step.eps, step.weight_decay, step.gradient_scale, step.step);
}

}  // namespace bough
