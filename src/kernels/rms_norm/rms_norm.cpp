#include "kernels/rms_norm/rms_norm.h"

#include <ATen/ATen.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "base/error.h"
#include "kernels/common/autograd.h"
#include "kernels/common/op.h"
#include "kernels/common/scratch.h"
#include "kernels/rms_norm/rms_norm_loops.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def("rms_norm_forward(Tensor x, Tensor weight, float eps, float weight_offset) -> (Tensor, Tensor)");
  m.def(
      "rms_norm_backward(Tensor d_y, Tensor x, Tensor weight, Tensor rstd, Tensor? residual, Tensor(a!) "
      "d_weight, Tensor(b!)? y, float weight_offset) -> Tensor");
}

namespace bough {

namespace {
struct RmsNormFunction : torch::autograd::Function<RmsNormFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Parameter& weight,
                            const NormSettings& norm) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [y, rstd] = rms_norm_forward(x, weight.value, norm);
    context->save_for_backward({x, rstd});
    context->saved_data["weight"] = weight.value;
    context->saved_data["main_grad"] = weight.main_grad;
    context->saved_data["weight_offset"] = norm.weight_offset;
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    return {rms_norm_backward({.d_y = d_outputs[0].contiguous(),
                               .x = saved[0],
                               .weight_D = data["weight"].toTensor(),
                               .rstd = saved[1],
                               .residual = {},
                               .d_weight_D = data["main_grad"].toTensor(),
                               .y = {},
                               .weight_offset = data["weight_offset"].toDouble()}),
            {},
            {}};
  }
};
}  // namespace

std::tuple<at::Tensor, at::Tensor> rms_norm_forward(const at::Tensor& x, const at::Tensor& weight_D,
                                                    const NormSettings& norm) {
  BOUGH_CHECK(
      x.is_contiguous() && x.size(-1) == weight_D.numel() && x.scalar_type() == weight_D.scalar_type(),
      "rms_norm: x ", x.sizes(), " ", x.scalar_type(), ", weight ", weight_D.sizes(), " ",
      weight_D.scalar_type());
  static const auto op =
      find_op<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, double, double)>(
          "bough::rms_norm_forward");
  return op.call(x, weight_D, norm.eps, norm.weight_offset);
}

at::Tensor rms_norm_backward(const RmsNormGradient& in) {
  const auto like_x = [&](const at::Tensor& tensor) {
    return tensor.is_contiguous() && tensor.sizes() == in.x.sizes() &&
           tensor.scalar_type() == in.x.scalar_type();
  };
  BOUGH_CHECK(like_x(in.d_y) && in.x.is_contiguous() && (!in.residual || like_x(*in.residual)) &&
                  (!in.y || like_x(*in.y)),
              "rms_norm: d_y ", in.d_y.sizes(), ", the residual's gradient or y is not like x ", in.x.sizes(),
              " ", in.x.scalar_type());
  using Optional = const std::optional<at::Tensor>&;
  static const auto op =
      find_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, Optional,
                         const at::Tensor&, Optional, double)>("bough::rms_norm_backward");
  // The kernels compute the weight's gradient together with the input's gradient. The gradient of a frozen
  // weight is discarded.
  const auto d_weight_D =
      in.d_weight_D.defined()
          ? in.d_weight_D
          : at::zeros_like(in.weight_D,
                           in.weight_D.options().dtype(accumulator_type(in.weight_D.scalar_type())));
  return op.call(in.d_y, in.x, in.weight_D, in.rstd, in.residual, d_weight_D, in.y, in.weight_offset);
}

at::Tensor rms_norm(const at::Tensor& x, const Parameter& weight, const NormSettings& norm) {
  return RmsNormFunction::apply(x, weight, norm);
}

std::tuple<at::Tensor, at::Tensor> rms_norm_forward_reference(const at::Tensor& x, const at::Tensor& weight_D,
                                                              const NormSettings& norm) {
  const auto acc = accumulator_type(x.scalar_type());
  const auto wide = x.to(acc);
  const auto rstd = (wide.square().mean(-1) + norm.eps).rsqrt();
  const auto y = wide * rstd.unsqueeze(-1) * (weight_D.to(acc) + norm.weight_offset);
  return {y.to(x.scalar_type()), rstd.flatten()};
}

at::Tensor rms_norm_backward_reference(const RmsNormGradient& in) {
  const auto acc = accumulator_type(in.x.scalar_type());
  const int64_t width = in.x.size(-1);
  const auto x_RD = in.x.to(acc).view({-1, width});
  const auto d_y_RD = in.d_y.to(acc).view({-1, width});
  const auto r = in.rstd.unsqueeze(-1);
  const auto weight_D = in.weight_D.to(acc) + in.weight_offset;
  const auto g_RD = d_y_RD * weight_D;
  in.d_weight_D.add_((d_y_RD * x_RD * r).sum(0));
  auto d_x = r * (g_RD - x_RD * r * r * (g_RD * x_RD).mean(-1, true));
  if (in.residual) d_x = d_x + in.residual->to(acc).view({-1, width});
  if (in.y) in.y->copy_((x_RD * r * weight_D).view(in.x.sizes()));
  return d_x.to(in.x.scalar_type()).view(in.x.sizes());
}

namespace {
std::tuple<at::Tensor, at::Tensor> rms_norm_forward_op(const at::Tensor& x, const at::Tensor& weight_D,
                                                       double eps, double weight_offset) {
  return rms_norm_forward_reference(x, weight_D, {eps, weight_offset});
}

at::Tensor rms_norm_backward_op(const at::Tensor& d_y, const at::Tensor& x, const at::Tensor& weight_D,
                                const at::Tensor& rstd, const std::optional<at::Tensor>& residual,
                                const at::Tensor& d_weight_D, const std::optional<at::Tensor>& y,
                                double weight_offset) {
  return rms_norm_backward_reference({d_y, x, weight_D, rstd, residual, d_weight_D, y, weight_offset});
}

std::tuple<at::Tensor, at::Tensor> rms_norm_forward_cpu(const at::Tensor& x, const at::Tensor& weight_D,
                                                        double eps, double weight_offset) {
  const NormSettings norm{eps, weight_offset};
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
                             data<T>(x) + begin * width, data<T>(weight_D), end - begin, width, norm);
    });
  });
  return {y, rstd};
}

at::Tensor rms_norm_backward_cpu(const at::Tensor& d_y, const at::Tensor& x, const at::Tensor& weight_D,
                                 const at::Tensor& rstd, const std::optional<at::Tensor>& residual,
                                 const at::Tensor& d_weight_D, const std::optional<at::Tensor>& y,
                                 double weight_offset) {
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
                             end - begin, width, weight_offset);
    });
    sums.add_to(mutable_data<A>(d_weight_D), 0, width);
  });
  return d_x;
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("rms_norm_forward", TORCH_FN(bough::rms_norm_forward_op));
  m.impl("rms_norm_backward", TORCH_FN(bough::rms_norm_backward_op));
}

TORCH_LIBRARY_IMPL(bough, CPU, m) {
  m.impl("rms_norm_forward", TORCH_FN(bough::rms_norm_forward_cpu));
  m.impl("rms_norm_backward", TORCH_FN(bough::rms_norm_backward_cpu));
}
