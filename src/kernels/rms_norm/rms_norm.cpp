#include "kernels/rms_norm/rms_norm.h"

#include "base/error.h"
#include "kernels/common/autograd.h"
#include "kernels/common/op.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def("rms_norm_forward(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def("rms_norm_backward(Tensor d_y, Tensor x, Tensor weight, Tensor rstd, Tensor(a!) d_weight) -> Tensor");
}

namespace bough {

namespace {
struct RmsNormFunction : torch::autograd::Function<RmsNormFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Parameter& weight,
                            double eps) {
    at::AutoDispatchBelowADInplaceOrView guard;
    static const auto op =
        find_op<std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, double)>(
            "bough::rms_norm_forward");
    auto [y, rstd] = op.call(x, weight.value, eps);
    context->save_for_backward({x, rstd});
    context->saved_data["weight"] = weight.value;
    context->saved_data["main_grad"] = weight.main_grad;
    return y;
  }

  static variable_list backward(AutogradContext* context, variable_list d_outputs) {
    static const auto op =
        find_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const at::Tensor&)>("bough::rms_norm_backward");
    const auto saved = context->get_saved_variables();
    return {op.call(d_outputs[0].contiguous(), saved[0], context->saved_data["weight"].toTensor(), saved[1],
                    context->saved_data["main_grad"].toTensor()),
            {},
            {}};
  }
};
}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const Parameter& weight, double eps) {
  BOUGH_CHECK(x.is_contiguous() && x.size(-1) == weight.value.numel() &&
                  x.scalar_type() == weight.value.scalar_type(),
              "rms_norm: x ", x.sizes(), " ", x.scalar_type(), ", weight ", weight.value.sizes(), " ",
              weight.value.scalar_type());
  return RmsNormFunction::apply(x, weight, eps);
}

}  // namespace bough
