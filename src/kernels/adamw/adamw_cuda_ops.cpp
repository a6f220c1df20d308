#include <ATen/ops/empty.h>

#include "kernels/adamw/adamw.h"
#include "kernels/adamw/adamw_cuda.h"
#include "kernels/common/cuda_launch.h"

namespace bough {

namespace {
at::Tensor sum_of_squares_op(Tensor x) {
  const Launch launch("sum_of_squares", {x});
  const auto options = x.options().dtype(at::kDouble);
  auto result = at::empty({}, options);
  auto partial = at::empty({sum_of_squares_num_parts(x.numel())}, options);
  dispatch_float_types(x.scalar_type(), "sum_of_squares", [&]<class T>() {
    sum_of_squares_cuda(mutable_data<double>(result), mutable_data<double>(partial), data<T>(x), x.numel(),
                        launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return result;
}

void adamw_op(Tensor value, const OptionalTensor& master, Tensor exp_avg, Tensor exp_avg_sq, Tensor gradient,
              double lr, double beta1, double beta2, double eps, double weight_decay, double gradient_scale,
              int64_t step) {
  const Launch launch("adamw", with_defined({value, exp_avg, exp_avg_sq, gradient}, {master}));
  dispatch_float_types(value.scalar_type(), "adamw", [&]<class T>() {
    using A = AccOf<T>;
    const auto scalars = adamw_scalars<A>({lr, beta1, beta2, eps, weight_decay, gradient_scale, step});
    adamw_cuda(AdamwArrays<T, A>{.value = mutable_data<T>(value),
                                 .master = optional_mutable_data<A>(master),
                                 .exp_avg = mutable_data<A>(exp_avg),
                                 .exp_avg_sq = mutable_data<A>(exp_avg_sq),
                                 .gradient = mutable_data<A>(gradient),
                                 .size = value.numel()},
               scalars, launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CUDA, m) {
  bough::register_cuda_kernel(m, "adamw_", TORCH_FN(bough::adamw_op));
  bough::register_cuda_kernel(m, "sum_of_squares", TORCH_FN(bough::sum_of_squares_op));
}
