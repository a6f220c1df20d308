#include "kernels/quantized_product/quantized_product.h"

#include <ATen/ATen.h>

#include <limits>

#include "base/error.h"
#include "kernels/common/op.h"
#include "kernels/parameter.h"

TORCH_LIBRARY_FRAGMENT(bough, m) {
  m.def("quantize_rows_(Tensor(a!) quantized, Tensor(b!) scale, Tensor weight) -> ()");
  m.def("quantized_product(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor? residual) -> Tensor");
}

namespace bough {

namespace {
using OptionalTensor = std::optional<at::Tensor>;

void check_quantized(const char* op, const at::Tensor& weight_OK, const at::Tensor& scale_O) {
  BOUGH_CHECK(weight_OK.dim() == 2 && weight_OK.is_contiguous() && weight_OK.scalar_type() == at::kChar &&
                  scale_O.dim() == 1 && scale_O.is_contiguous() && scale_O.scalar_type() == at::kFloat &&
                  scale_O.size(0) == weight_OK.size(0) && scale_O.device() == weight_OK.device(),
              op, ": weight ", weight_OK.sizes(), " ", weight_OK.scalar_type(), ", scale ", scale_O.sizes(),
              " ", scale_O.scalar_type(), "; expected int8 [O, K] and fp32 [O], contiguous");
}

void check_added(const char* name, const OptionalTensor& added, at::IntArrayRef sizes, const at::Tensor& x) {
  BOUGH_CHECK(!added || (added->is_contiguous() && added->sizes() == sizes &&
                         added->scalar_type() == x.scalar_type() && added->device() == x.device()),
              "quantized_product: ", name, " ", added->sizes(), " ", added->scalar_type(), "; expected ",
              sizes, " ", x.scalar_type());
}
}  // namespace

void quantize_rows_(const at::Tensor& quantized_OK, const at::Tensor& scale_O, const at::Tensor& weight_OK) {
  check_quantized("quantize_rows_", quantized_OK, scale_O);
  BOUGH_CHECK(weight_OK.is_contiguous() && weight_OK.sizes() == quantized_OK.sizes() &&
                  weight_OK.device() == quantized_OK.device(),
              "quantize_rows_: weight ", weight_OK.sizes(), " for ", quantized_OK.sizes());
  static const auto op =
      find_op<void(const at::Tensor&, const at::Tensor&, const at::Tensor&)>("bough::quantize_rows_");
  op.call(quantized_OK, scale_O, weight_OK);
}

at::Tensor quantized_product(const at::Tensor& x_RK, const at::Tensor& weight_OK, const at::Tensor& scale_O,
                             const OptionalTensor& bias_O, const OptionalTensor& residual_RO) {
  check_quantized("quantized_product", weight_OK, scale_O);
  BOUGH_CHECK(x_RK.dim() == 2 && x_RK.size(1) == weight_OK.size(1) && x_RK.device() == weight_OK.device(),
              "quantized_product: x ", x_RK.sizes(), " on ", x_RK.device().str(), ", weight ",
              weight_OK.sizes(), " on ", weight_OK.device().str());
  check_added("bias", bias_O, {weight_OK.size(0)}, x_RK);
  check_added("residual", residual_RO, {x_RK.size(0), weight_OK.size(0)}, x_RK);
  static const auto op =
      find_op<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                         const OptionalTensor&)>("bough::quantized_product");
  return op.call(x_RK.contiguous(), weight_OK, scale_O, bias_O, residual_RO);
}

void quantize_rows_reference_(const at::Tensor& quantized_OK, const at::Tensor& scale_O,
                              const at::Tensor& weight_OK) {
  const auto w_OK = weight_OK.to(at::kFloat);
  if (w_OK.numel() == 0) {
    scale_O.zero_();
    return;
  }
  const auto largest_O = w_OK.abs().amax(1);
  const auto finite_O = largest_O.isfinite();
  const auto steps_O = (127 / largest_O).nan_to_num_(0, 0, 0);  // infinite for a row of zeros
  quantized_OK.copy_((w_OK * steps_O.unsqueeze(1)).round_().nan_to_num_(0, 0, 0));
  scale_O.copy_(largest_O / 127)
      .masked_fill_(finite_O.logical_not(), std::numeric_limits<float>::quiet_NaN());
}

at::Tensor quantized_product_reference(const at::Tensor& x_RK, const at::Tensor& weight_OK,
                                       const at::Tensor& scale_O, const std::optional<at::Tensor>& bias_O,
                                       const std::optional<at::Tensor>& residual_RO) {
  const auto acc = accumulator_type(x_RK.scalar_type());
  auto y_RO = at::mm(x_RK.to(acc), weight_OK.to(acc).t()).mul_(scale_O);
  if (bias_O) y_RO.add_(*bias_O);
  if (residual_RO) y_RO.add_(*residual_RO);
  return y_RO.to(x_RK.scalar_type());
}

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("quantize_rows_", TORCH_FN(bough::quantize_rows_reference_));
  m.impl("quantized_product", TORCH_FN(bough::quantized_product_reference));
}
