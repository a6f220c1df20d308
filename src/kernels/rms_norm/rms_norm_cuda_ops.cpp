#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <tuple>

#include "kernels/common/cuda_launch.h"
#include "kernels/parameter.h"
#include "kernels/rms_norm/rms_norm_cuda.h"

namespace bough {

namespace {
std::tuple<at::Tensor, at::Tensor> rms_norm_forward_op(Tensor x, Tensor weight_D, double eps,
                                                       double weight_offset) {
  const Launch launch("rms_norm", {x, weight_D});
  const int64_t width = x.size(-1);
  const int64_t num_rows = width ? x.numel() / width : 0;
  auto y = at::empty_like(x);
  auto rstd = at::empty({num_rows}, x.options().dtype(accumulator_type(x.scalar_type())));
  dispatch_float_types(x.scalar_type(), "rms_norm", [&]<class T>() {
    rms_norm_forward_cuda(mutable_data<T>(y), mutable_data<AccOf<T>>(rstd), data<T>(x), data<T>(weight_D),
                          num_rows, width, {eps, weight_offset}, launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {y, rstd};
}

at::Tensor rms_norm_backward_op(Tensor d_y, Tensor x, Tensor weight_D, Tensor rstd,
                                const OptionalTensor& residual, Tensor d_weight_D, const OptionalTensor& y,
                                double weight_offset) {
  const Launch launch("rms_norm", with_defined({d_y, x, weight_D, rstd, d_weight_D}, {residual, y}));
  const int64_t num_rows = rstd.numel();
  auto d_x = at::empty_like(x);
  auto partial = at::empty({rms_norm_num_parts(num_rows), x.size(-1)}, rstd.options());
  dispatch_float_types(x.scalar_type(), "rms_norm", [&]<class T>() {
    using A = AccOf<T>;
    rms_norm_backward_cuda(RmsNormBackward<T, A>{.d_x = mutable_data<T>(d_x),
                                                 .y = optional_mutable_data<T>(y),
                                                 .d_weight = mutable_data<A>(d_weight_D),
                                                 .partial = mutable_data<A>(partial),
                                                 .d_y = data<T>(d_y),
                                                 .x = data<T>(x),
                                                 .weight = data<T>(weight_D),
                                                 .residual = optional_data<T>(residual),
                                                 .rstd = data<A>(rstd),
                                                 .num_rows = num_rows,
                                                 .width = x.size(-1),
                                                 .weight_offset = static_cast<A>(weight_offset)},
                           launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return d_x;
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CUDA, m) {
  bough::register_cuda_kernel(m, "rms_norm_forward", TORCH_FN(bough::rms_norm_forward_op));
  bough::register_cuda_kernel(m, "rms_norm_backward", TORCH_FN(bough::rms_norm_backward_op));
}
