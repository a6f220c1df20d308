#include "kernels/swiglu/swiglu.h"

#include <ATen/ATen.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "base/error.h"
#include "kernels/common/op.h"
#include "kernels/parameter.h"
#include "kernels/swiglu/swiglu_loops.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def("swiglu_forward(Tensor gate_up, int activation) -> Tensor");
  m.def(
      "swiglu_backward(Tensor d_y, Tensor gate_up, Tensor(a!) y, Tensor(b!) d_gate_up, int activation) -> "
      "()");
}

namespace bough {

at::Tensor swiglu_forward(const at::Tensor& gate_up_TF2, GateActivation activation) {
  BOUGH_CHECK(gate_up_TF2.dim() == 2 && gate_up_TF2.is_contiguous() && gate_up_TF2.size(1) % 2 == 0,
              "swiglu: gate_up ", gate_up_TF2.sizes());
  static const auto op = find_op<at::Tensor(const at::Tensor&, int64_t)>("bough::swiglu_forward");
  return op.call(gate_up_TF2, static_cast<int64_t>(activation));
}

void swiglu_backward(const at::Tensor& d_y_TF, const at::Tensor& gate_up_TF2, const at::Tensor& y_TF,
                     const at::Tensor& d_gate_up_TF2, GateActivation activation) {
  BOUGH_CHECK(gate_up_TF2.dim() == 2 && d_y_TF.dim() == 2 && d_y_TF.size(0) == gate_up_TF2.size(0) &&
                  2 * d_y_TF.size(1) == gate_up_TF2.size(1) && y_TF.sizes() == d_y_TF.sizes() &&
                  d_gate_up_TF2.sizes() == gate_up_TF2.sizes(),
              "swiglu: gate_up ", gate_up_TF2.sizes(), ", d_y ", d_y_TF.sizes(), ", y ", y_TF.sizes(),
              ", d_gate_up ", d_gate_up_TF2.sizes());
  for (const auto* tensor : {&d_y_TF, &gate_up_TF2, &y_TF, &d_gate_up_TF2})
    BOUGH_CHECK(tensor->is_contiguous() && tensor->scalar_type() == gate_up_TF2.scalar_type(),
                "swiglu: a tensor is not contiguous, or its dtype differs from gate_up's");
  static const auto op =
      find_op<void(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t)>(
          "bough::swiglu_backward");
  op.call(d_y_TF, gate_up_TF2, y_TF, d_gate_up_TF2, static_cast<int64_t>(activation));
}

namespace {
// Returns p(x) and x · p'(x).
std::pair<at::Tensor, at::Tensor> gate_argument(const at::Tensor& x, GateActivation activation) {
  if (activation == GateActivation::kSilu) return {x, x};
  const double linear = 2 * std::sqrt(2 / M_PI), cube = 0.044715 * linear;
  const auto cubed = cube * x * x * x;
  return {linear * x + cubed, linear * x + 3 * cubed};
}
}  // namespace

at::Tensor swiglu_forward_reference(const at::Tensor& gate_up_TF2, GateActivation activation) {
  const auto parts = gate_up_TF2.to(accumulator_type(gate_up_TF2.scalar_type())).chunk(2, -1);
  return (parts[0] * gate_argument(parts[0], activation).first.sigmoid() * parts[1])
      .to(gate_up_TF2.scalar_type());
}

void swiglu_backward_reference(const at::Tensor& d_y_TF, const at::Tensor& gate_up_TF2,
                               const at::Tensor& y_TF, const at::Tensor& d_gate_up_TF2,
                               GateActivation activation) {
  const auto acc = accumulator_type(gate_up_TF2.scalar_type());
  const auto parts = gate_up_TF2.to(acc).chunk(2, -1);
  const auto d_y = d_y_TF.to(acc);
  const auto [argument, steepness] = gate_argument(parts[0], activation);
  const auto s = argument.sigmoid();
  const auto y = swiglu_forward_reference(gate_up_TF2, activation);
  d_gate_up_TF2.copy_(at::cat({d_y * parts[1] * s * (1 + steepness * (1 - s)), d_y * parts[0] * s}, -1));
  y_TF.copy_(y);
}

namespace {
at::Tensor forward_op(const at::Tensor& gate_up_TF2, int64_t activation) {
  return swiglu_forward_reference(gate_up_TF2, static_cast<GateActivation>(activation));
}

void backward_op(const at::Tensor& d_y_TF, const at::Tensor& gate_up_TF2, const at::Tensor& y_TF,
                 const at::Tensor& d_gate_up_TF2, int64_t activation) {
  swiglu_backward_reference(d_y_TF, gate_up_TF2, y_TF, d_gate_up_TF2,
                            static_cast<GateActivation>(activation));
}

at::Tensor swiglu_forward_cpu(const at::Tensor& gate_up_TF2, int64_t activation) {
  const int64_t width = gate_up_TF2.size(1) / 2;
  auto y_TF = at::empty({gate_up_TF2.size(0), width}, gate_up_TF2.options());
  dispatch_float_types(gate_up_TF2.scalar_type(), "swiglu", [&]<class T>() {
    T* y = mutable_data<T>(y_TF);
    at::parallel_for(0, y_TF.size(0), grain(2 * width), [&](int64_t begin, int64_t end) {
      BOUGH_BF16_OR_ISA_CALL(T, width % 32 == 0, swiglu_rows, y + begin * width,
                             data<T>(gate_up_TF2) + 2 * begin * width, end - begin, width,
                             static_cast<GateActivation>(activation));
    });
  });
  return y_TF;
}

void swiglu_backward_cpu(const at::Tensor& d_y_TF, const at::Tensor& gate_up_TF2, const at::Tensor& y_TF,
                         const at::Tensor& d_gate_up_TF2, int64_t activation) {
  const int64_t width = gate_up_TF2.size(1) / 2;
  dispatch_float_types(gate_up_TF2.scalar_type(), "swiglu", [&]<class T>() {
    T* d_gate_up = mutable_data<T>(d_gate_up_TF2);
    T* y = mutable_data<T>(y_TF);
    at::parallel_for(0, d_y_TF.size(0), grain(2 * width), [&](int64_t begin, int64_t end) {
      BOUGH_BF16_OR_ISA_CALL(T, width % 32 == 0, swiglu_backward_rows, d_gate_up + 2 * begin * width,
                             y + begin * width, data<T>(d_y_TF) + begin * width,
                             data<T>(gate_up_TF2) + 2 * begin * width, end - begin, width,
                             static_cast<GateActivation>(activation));
    });
  });
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("swiglu_forward", TORCH_FN(bough::forward_op));
  m.impl("swiglu_backward", TORCH_FN(bough::backward_op));
}

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("swiglu_forward", TORCH_FN(bough::swiglu_forward_cpu));
  m.impl("swiglu_backward", TORCH_FN(bough::swiglu_backward_cpu));
}
