#include <ATen/ATen.h>

#include "kernels/common/op.h"
#include "kernels/parameter.h"
#include "kernels/swiglu/swiglu.h"

namespace bough {

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
