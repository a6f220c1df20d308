#include <ATen/ATen.h>

#include "kernels/common/op.h"
#include "kernels/rms_norm/rms_norm.h"

namespace bough {

std::tuple<at::Tensor, at::Tensor> rms_norm_forward_reference(const at::Tensor& x, const at::Tensor& weight_D,
                                                              double eps) {
  const auto acc = accumulator_type(x.scalar_type());
  const auto wide = x.to(acc);
  const auto rstd = (wide.square().mean(-1) + eps).rsqrt();
  const auto y = wide * rstd.unsqueeze(-1) * weight_D.to(acc);
  return {y.to(x.scalar_type()), rstd.flatten()};
}

at::Tensor rms_norm_backward_reference(const at::Tensor& d_y, const at::Tensor& x, const at::Tensor& weight_D,
                                       const at::Tensor& rstd, const at::Tensor& d_weight_D) {
  const auto acc = accumulator_type(x.scalar_type());
  const int64_t width = x.size(-1);
  const auto x_RD = x.to(acc).view({-1, width});
  const auto d_y_RD = d_y.to(acc).view({-1, width});
  const auto r = rstd.unsqueeze(-1);
  const auto g_RD = d_y_RD * weight_D.to(acc);
  d_weight_D.add_((d_y_RD * x_RD * r).sum(0));
  const auto d_x = r * (g_RD - x_RD * r * r * (g_RD * x_RD).mean(-1, true));
  return d_x.to(x.scalar_type()).view(x.sizes());
}

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("rms_norm_forward", TORCH_FN(bough::rms_norm_forward_reference));
  m.impl("rms_norm_backward", TORCH_FN(bough::rms_norm_backward_reference));
}
