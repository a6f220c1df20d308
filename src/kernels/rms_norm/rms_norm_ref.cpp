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

at::Tensor rms_norm_backward_reference(const RmsNormGradient& in) {
  const auto acc = accumulator_type(in.x.scalar_type());
  const int64_t width = in.x.size(-1);
  const auto x_RD = in.x.to(acc).view({-1, width});
  const auto d_y_RD = in.d_y.to(acc).view({-1, width});
  const auto r = in.rstd.unsqueeze(-1);
  const auto g_RD = d_y_RD * in.weight_D.to(acc);
  in.d_weight_D.add_((d_y_RD * x_RD * r).sum(0));
  auto d_x = r * (g_RD - x_RD * r * r * (g_RD * x_RD).mean(-1, true));
  if (in.residual) d_x = d_x + in.residual->to(acc).view({-1, width});
  if (in.y) in.y->copy_((x_RD * r * in.weight_D.to(acc)).view(in.x.sizes()));
  return d_x.to(in.x.scalar_type()).view(in.x.sizes());
}

namespace {
at::Tensor backward_op(const at::Tensor& d_y, const at::Tensor& x, const at::Tensor& weight_D,
                       const at::Tensor& rstd, const std::optional<at::Tensor>& residual,
                       const at::Tensor& d_weight_D, const std::optional<at::Tensor>& y) {
  return rms_norm_backward_reference({d_y, x, weight_D, rstd, residual, d_weight_D, y});
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("rms_norm_forward", TORCH_FN(bough::rms_norm_forward_reference));
  m.impl("rms_norm_backward", TORCH_FN(bough::backward_op));
}
