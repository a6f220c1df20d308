#include <ATen/ops/empty.h>

#include "kernels/common/op.h"
#include "kernels/swiglu/swiglu.h"
#include "kernels/swiglu/swiglu_isa.h"

namespace bough {

namespace {
at::Tensor swiglu_forward_cpu(const at::Tensor& gate_up_TF2) {
  const int64_t width = gate_up_TF2.size(1) / 2;
  auto y_TF = at::empty({gate_up_TF2.size(0), width}, gate_up_TF2.options());
  dispatch_float_types(gate_up_TF2.scalar_type(), "swiglu", [&]<class T>() {
    T* y = mutable_data<T>(y_TF);
    at::parallel_for(0, y_TF.size(0), grain(2 * width), [&](int64_t begin, int64_t end) {
      BOUGH_BF16_OR_ISA_CALL(T, width % 32 == 0, swiglu_rows, y + begin * width,
                             data<T>(gate_up_TF2) + 2 * begin * width, end - begin, width);
    });
  });
  return y_TF;
}

void swiglu_backward_cpu(const at::Tensor& d_y_TF, const at::Tensor& gate_up_TF2, const at::Tensor& y_TF,
                         const at::Tensor& d_gate_up_TF2) {
  const int64_t width = gate_up_TF2.size(1) / 2;
  dispatch_float_types(gate_up_TF2.scalar_type(), "swiglu", [&]<class T>() {
    T* d_gate_up = mutable_data<T>(d_gate_up_TF2);
    T* y = mutable_data<T>(y_TF);
    at::parallel_for(0, d_y_TF.size(0), grain(2 * width), [&](int64_t begin, int64_t end) {
      BOUGH_BF16_OR_ISA_CALL(T, width % 32 == 0, swiglu_backward_rows, d_gate_up + 2 * begin * width,
                             y + begin * width, data<T>(d_y_TF) + begin * width,
                             data<T>(gate_up_TF2) + 2 * begin * width, end - begin, width);
    });
  });
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("swiglu_forward", TORCH_FN(bough::swiglu_forward_cpu));
  m.impl("swiglu_backward", TORCH_FN(bough::swiglu_backward_cpu));
}
