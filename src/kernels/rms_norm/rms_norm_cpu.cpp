#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "kernels/common/op.h"
#include "kernels/common/scratch.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/rms_norm/rms_norm_isa.h"

namespace bough {

namespace {
std::tuple<at::Tensor, at::Tensor> rms_norm_forward_cpu(const at::Tensor& x, const at::Tensor& weight_D,
                                                        double eps) {
  const int64_t width = x.size(-1);
  const int64_t num_rows = width ? x.numel() / width : 0;
  auto y = at::empty_like(x);
  auto rstd = at::empty({num_rows}, x.options().dtype(accumulator_type(x.scalar_type())));
  dispatch_float_types(x.scalar_type(), "rms_norm", [&]<class T>() {
    using A = AccOf<T>;
    T* y_data = mutable_data<T>(y);
    A* rstd_data = mutable_data<A>(rstd);
    at::parallel_for(0, num_rows, grain(width), [&](int64_t begin, int64_t end) {
      BOUGH_BF16_OR_ISA_CALL(T, width % 32 == 0, rms_norm_rows, y_data + begin * width, rstd_data + begin,
                             data<T>(x) + begin * width, data<T>(weight_D), end - begin, width, eps);
    });
  });
  return {y, rstd};
}

at::Tensor rms_norm_backward_cpu(const at::Tensor& d_y, const at::Tensor& x, const at::Tensor& weight_D,
                                 const at::Tensor& rstd, const std::optional<at::Tensor>& residual,
                                 const at::Tensor& d_weight_D, const std::optional<at::Tensor>& y) {
  const int64_t width = x.size(-1);
  const int64_t num_rows = rstd.numel();
  auto d_x = at::empty_like(x);
  dispatch_float_types(x.scalar_type(), "rms_norm", [&]<class T>() {
    using A = AccOf<T>;
    const PartialSums<A> sums(num_rows, grain(width), width);
    T* d_x_data = mutable_data<T>(d_x);
    T* y_data = y ? mutable_data<T>(*y) : nullptr;
    const T* residual_data = residual ? data<T>(*residual) : nullptr;
    sums.for_parts([&](int64_t begin, int64_t end, A* d_weight) {
      BOUGH_BF16_OR_ISA_CALL(T, width % 32 == 0, rms_norm_backward_rows, d_x_data + begin * width,
                             y_data ? y_data + begin * width : nullptr, d_weight,
                             data<T>(d_y) + begin * width, data<T>(x) + begin * width, data<T>(weight_D),
                             residual_data ? residual_data + begin * width : nullptr, data<A>(rstd) + begin,
                             end - begin, width);
    });
    sums.add_to(mutable_data<A>(d_weight_D), 0, width);
  });
  return d_x;
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("rms_norm_forward", TORCH_FN(bough::rms_norm_forward_cpu));
  m.impl("rms_norm_backward", TORCH_FN(bough::rms_norm_backward_cpu));
}
