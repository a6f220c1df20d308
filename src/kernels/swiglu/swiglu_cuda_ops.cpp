#include <ATen/ops/empty.h>

#include "kernels/common/cuda_launch.h"
#include "kernels/swiglu/swiglu_cuda.h"

namespace bough {

namespace {
at::Tensor swiglu_forward_op(Tensor gate_up_TF2, int64_t activation) {
  const Launch launch("swiglu", {gate_up_TF2});
  const int64_t width = gate_up_TF2.size(1) / 2;
  auto y_TF = at::empty({gate_up_TF2.size(0), width}, gate_up_TF2.options());
  dispatch_float_types(gate_up_TF2.scalar_type(), "swiglu", [&]<class T>() {
    swiglu_forward_cuda(mutable_data<T>(y_TF), data<T>(gate_up_TF2), y_TF.size(0), width,
                        static_cast<GateActivation>(activation), launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y_TF;
}

void swiglu_backward_op(Tensor d_y_TF, Tensor gate_up_TF2, Tensor y_TF, Tensor d_gate_up_TF2,
                        int64_t activation) {
  const Launch launch("swiglu", {d_y_TF, gate_up_TF2, y_TF, d_gate_up_TF2});
  dispatch_float_types(gate_up_TF2.scalar_type(), "swiglu", [&]<class T>() {
    swiglu_backward_cuda(mutable_data<T>(d_gate_up_TF2), mutable_data<T>(y_TF), data<T>(d_y_TF),
                         data<T>(gate_up_TF2), d_y_TF.size(0), d_y_TF.size(1),
                         static_cast<GateActivation>(activation), launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CUDA, m) {
  bough::register_cuda_kernel(m, "swiglu_forward", TORCH_FN(bough::swiglu_forward_op));
  bough::register_cuda_kernel(m, "swiglu_backward", TORCH_FN(bough::swiglu_backward_op));
}
