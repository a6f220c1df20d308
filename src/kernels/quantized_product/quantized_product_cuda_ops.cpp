// The CUDA kernels of quantized_product as torch ops. The kernel is for bf16 and decoding's few rows; many rows, as of a
// prompt, bind the tensor cores: their weight is widened, exactly, for cuBLAS.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <torch/library.h>

#include "kernels/common/cuda_launch.h"
#include "kernels/common/dispatch.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/quantized_product/quantized_product.h"
#include "kernels/quantized_product/quantized_product_cuda.h"

namespace bough {

namespace {
using Tensor = const at::Tensor&;
using OptionalTensor = std::optional<at::Tensor>;

constexpr int64_t kFewRows = 256;

void quantize_rows_op(Tensor quantized_OI, Tensor scale_O, Tensor weight_OI) {
  const Launch launch("quantize_rows_", {quantized_OI, scale_O, weight_OI});
  if (weight_OI.numel() == 0) return quantize_rows_reference_(quantized_OI, scale_O, weight_OI);
  dispatch_float_types(weight_OI.scalar_type(), "quantize_rows_", [&]<class T>() {
    quantize_rows_cuda(mutable_data<int8_t>(quantized_OI), mutable_data<float>(scale_O), data<T>(weight_OI),
                       weight_OI.size(0), weight_OI.size(1), launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

at::Tensor product_of_many_rows(Tensor x_RI, Tensor weight_OI, Tensor scale_O, const OptionalTensor& bias_O,
                                const OptionalTensor& residual_RO) {
  const auto sums_RO = at::zeros({x_RI.size(0), weight_OI.size(0)}, scale_O.options());
  add_matrix_product_(sums_RO, x_RI, weight_OI.to(x_RI.scalar_type()).t());
  sums_RO.mul_(scale_O);
  if (bias_O) sums_RO.add_(*bias_O);
  if (residual_RO) sums_RO.add_(*residual_RO);
  return sums_RO.to(x_RI.scalar_type());
}

at::Tensor quantized_product_op(Tensor x_RI, Tensor weight_OI, Tensor scale_O, const OptionalTensor& bias_O,
                                const OptionalTensor& residual_RO) {
  if (x_RI.scalar_type() != at::kBFloat16 || x_RI.numel() == 0 || weight_OI.numel() == 0)
    return quantized_product_reference(x_RI, weight_OI, scale_O, bias_O, residual_RO);
  const Launch launch("quantized_product", {x_RI, weight_OI, scale_O});
  auto y_RO = at::empty({x_RI.size(0), weight_OI.size(0)}, x_RI.options());
  using T = BFloat16Bits;
  const QuantizedProductCuda product{.y = mutable_data<T>(y_RO),
                                     .x = data<T>(x_RI),
                                     .weight = data<int8_t>(weight_OI),
                                     .scale = data<float>(scale_O),
                                     .bias = bias_O ? data<T>(*bias_O) : nullptr,
                                     .residual = residual_RO ? data<T>(*residual_RO) : nullptr,
                                     .rows = x_RI.size(0),
                                     .inputs = x_RI.size(1),
                                     .outputs = weight_OI.size(0)};
  if (product.rows > kFewRows || !fits_quantized_product_cuda(product))
    return product_of_many_rows(x_RI, weight_OI, scale_O, bias_O, residual_RO);
  quantized_product_cuda(product, launch.stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y_RO;
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CUDA, m) {
  m.impl("quantize_rows_", TORCH_FN(bough::quantize_rows_op));
  m.impl("quantized_product", TORCH_FN(bough::quantized_product_op));
}
