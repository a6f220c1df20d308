#include "kernels/swiglu/swiglu.h"

#include <ATen/ATen.h>

#include "base/error.h"
#include "kernels/common/op.h"
#include "kernels/parameter.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def("swiglu_forward(Tensor gate_up) -> Tensor");
  m.def("swiglu_backward(Tensor d_y, Tensor gate_up, Tensor(a!) y, Tensor(b!) d_gate_up) -> ()");
}

namespace bough {

at::Tensor swiglu_forward(const at::Tensor& gate_up_TF2) {
  BOUGH_CHECK(gate_up_TF2.dim() == 2 && gate_up_TF2.is_contiguous() && gate_up_TF2.size(1) % 2 == 0,
              "swiglu: gate_up ", gate_up_TF2.sizes());
  static const auto op = find_op<at::Tensor(const at::Tensor&)>("bough::swiglu_forward");
  return op.call(gate_up_TF2);
}

void swiglu_backward(const at::Tensor& d_y_TF, const at::Tensor& gate_up_TF2, const at::Tensor& y_TF,
                     const at::Tensor& d_gate_up_TF2) {
  BOUGH_CHECK(gate_up_TF2.dim() == 2 && d_y_TF.dim() == 2 && d_y_TF.size(0) == gate_up_TF2.size(0) &&
                  2 * d_y_TF.size(1) == gate_up_TF2.size(1) && y_TF.sizes() == d_y_TF.sizes() &&
                  d_gate_up_TF2.sizes() == gate_up_TF2.sizes(),
              "swiglu: gate_up ", gate_up_TF2.sizes(), ", d_y ", d_y_TF.sizes(), ", y ", y_TF.sizes(),
              ", d_gate_up ", d_gate_up_TF2.sizes());
  for (const auto* tensor : {&d_y_TF, &gate_up_TF2, &y_TF, &d_gate_up_TF2})
    BOUGH_CHECK(tensor->is_contiguous() && tensor->scalar_type() == gate_up_TF2.scalar_type(),
                "swiglu: a tensor is not contiguous, or of another dtype than gate_up");
  static const auto op =
      find_op<void(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&)>(
          "bough::swiglu_backward");
  op.call(d_y_TF, gate_up_TF2, y_TF, d_gate_up_TF2);
}

at::Tensor swiglu_forward_reference(const at::Tensor& gate_up_TF2) {
  const auto parts = gate_up_TF2.to(accumulator_type(gate_up_TF2.scalar_type())).chunk(2, -1);
  return (parts[0] * parts[0].sigmoid() * parts[1]).to(gate_up_TF2.scalar_type());
}

void swiglu_backward_reference(const at::Tensor& d_y_TF, const at::Tensor& gate_up_TF2,
                               const at::Tensor& y_TF, const at::Tensor& d_gate_up_TF2) {
  const auto acc = accumulator_type(gate_up_TF2.scalar_type());
  const auto parts = gate_up_TF2.to(acc).chunk(2, -1);
  const auto d_y = d_y_TF.to(acc);
  const auto s = parts[0].sigmoid();
  const auto y = swiglu_forward_reference(gate_up_TF2);
  d_gate_up_TF2.copy_(at::cat({d_y * parts[1] * s * (1 + parts[0] * (1 - s)), d_y * parts[0] * s}, -1));
  y_TF.copy_(y);
}

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("swiglu_forward", TORCH_FN(bough::swiglu_forward_reference));
  m.impl("swiglu_backward", TORCH_FN(bough::swiglu_backward_reference));
}
