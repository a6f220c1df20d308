#include <ATen/ATen.h>

#include <limits>

#include "kernels/common/op.h"
#include "kernels/parameter.h"
#include "kernels/quantized_product/quantized_product.h"

namespace bough {

void quantize_rows_reference_(const at::Tensor& quantized_OI, const at::Tensor& scale_O,
                              const at::Tensor& weight_OI) {
  const auto w_OI = weight_OI.to(at::kFloat);
  if (w_OI.numel() == 0) {
    scale_O.zero_();
    return;
  }
  const auto largest_O = w_OI.abs().amax(1);
  const auto finite_O = largest_O.isfinite();
  const auto steps_O = (127 / largest_O).nan_to_num_(0, 0, 0);  // infinite for a row of zeros
  quantized_OI.copy_((w_OI * steps_O.unsqueeze(1)).round_().nan_to_num_(0, 0, 0));
  scale_O.copy_(largest_O / 127)
      .masked_fill_(finite_O.logical_not(), std::numeric_limits<float>::quiet_NaN());
}

at::Tensor quantized_product_reference(const at::Tensor& x_RI, const at::Tensor& weight_OI,
                                       const at::Tensor& scale_O, const std::optional<at::Tensor>& bias_O,
                                       const std::optional<at::Tensor>& residual_RO) {
  const auto acc = accumulator_type(x_RI.scalar_type());
  auto y_RO = at::mm(x_RI.to(acc), weight_OI.to(acc).t()).mul_(scale_O);
  if (bias_O) y_RO.add_(*bias_O);
  if (residual_RO) y_RO.add_(*residual_RO);
  return y_RO.to(x_RI.scalar_type());
}

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CompositeExplicitAutograd, m) {
  m.impl("quantize_rows_", TORCH_FN(bough::quantize_rows_reference_));
  m.impl("quantized_product", TORCH_FN(bough::quantized_product_reference));
}
