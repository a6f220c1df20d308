#include "kernels/adamw/adamw.h"

#include <ATen/ATen.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "base/error.h"
#include "kernels/adamw/adamw_loops.h"
#include "kernels/common/op.h"
#include "kernels/parameter.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def(
      "adamw_(Tensor(a!) value, Tensor(b!)? master, Tensor(c!) exp_avg, Tensor(d!) exp_avg_sq, Tensor(e!) "
      "gradient, "
      "float lr, float beta1, float beta2, float eps, float weight_decay, float gradient_scale, int step) -> "
      "()");
  m.def("sum_of_squares(Tensor x) -> Tensor");
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

template <class A>
AdamwScalars<A> adamw_scalars(const AdamwStep& s) {
  const auto round = [](double x) { return static_cast<A>(x); };
  return {.gradient_scale = round(s.gradient_scale),
          .beta1 = round(s.beta1),
          .one_minus_beta1 = round(1 - s.beta1),
          .beta2 = round(s.beta2),
          .one_minus_beta2 = round(1 - s.beta2),
          .decay = round(1 - s.lr * s.weight_decay),
          .step_size = round(s.lr / (1 - std::pow(s.beta1, s.step))),
          .inverse_variance = round(1 / (1 - std::pow(s.beta2, s.step))),
          .eps = round(s.eps)};
}
template AdamwScalars<float> adamw_scalars(const AdamwStep&);
template AdamwScalars<double> adamw_scalars(const AdamwStep&);

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

at::Tensor sum_of_squares(const at::Tensor& x) {
  BOUGH_CHECK(x.is_contiguous() && x.is_floating_point(), "sum_of_squares: x ", x.sizes(), " ",
              x.scalar_type());
  static const auto op = find_op<at::Tensor(const at::Tensor&)>("bough::sum_of_squares");
  return op.call(x);
}

at::Tensor sum_of_squares_reference(const at::Tensor& x) {
  return x.to(at::kDouble).square().sum();
}

namespace {
void adamw_cpu(const at::Tensor& value, const std::optional<at::Tensor>& master, const at::Tensor& exp_avg,
               const at::Tensor& exp_avg_sq, const at::Tensor& gradient, double lr, double beta1,
               double beta2, double eps, double weight_decay, double gradient_scale, int64_t step) {
  dispatch_float_types(value.scalar_type(), "adamw", [&]<class T>() {
    using A = AccOf<T>;
    const auto scalars = adamw_scalars<A>({lr, beta1, beta2, eps, weight_decay, gradient_scale, step});
    T* value_data = mutable_data<T>(value);
    A* master_data = master ? mutable_data<A>(*master) : nullptr;
    A* exp_avg_data = mutable_data<A>(exp_avg);
    A* exp_avg_sq_data = mutable_data<A>(exp_avg_sq);
    A* gradient_data = mutable_data<A>(gradient);
    at::parallel_for(0, value.numel(), grain(1), [&](int64_t begin, int64_t end) {
      BOUGH_ISA_CALL(adamw_elements, value_data + begin, master_data ? master_data + begin : nullptr,
                     exp_avg_data + begin, exp_avg_sq_data + begin, gradient_data + begin, end - begin,
                     scalars);
    });
  });
}

at::Tensor sum_of_squares_cpu(const at::Tensor& x) {
  const int64_t size = x.numel();
  const int64_t num_blocks = (size + kSumOfSquaresBlock - 1) / kSumOfSquaresBlock;
  std::vector<double> sums(static_cast<size_t>(num_blocks));
  dispatch_float_types(x.scalar_type(), "sum_of_squares", [&]<class T>() {
    const T* x_data = data<T>(x);
    at::parallel_for(0, num_blocks, 1, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        const int64_t begin = block * kSumOfSquaresBlock;
        BOUGH_ISA_CALL(sum_of_squares_block, &sums[static_cast<size_t>(block)], x_data + begin,
                       std::min(kSumOfSquaresBlock, size - begin));
      }
    });
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  const auto result = at::empty({}, at::TensorOptions().dtype(at::kDouble));
  *mutable_data<double>(result) = total;
  return result;
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("adamw_", TORCH_FN(bough::adamw_reference_op));
  m.impl("sum_of_squares", TORCH_FN(bough::sum_of_squares_reference));
}

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("adamw_", TORCH_FN(bough::adamw_cpu));
  m.impl("sum_of_squares", TORCH_FN(bough::sum_of_squares_cpu));
}
