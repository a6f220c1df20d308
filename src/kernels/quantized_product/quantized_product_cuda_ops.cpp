#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "kernels/common/cuda_launch.h"
#include "kernels/matrix_product/matrix_product.h"
#include "kernels/quantized_product/quantized_product.h"
#include "kernels/quantized_product/quantized_product_cuda.h"

namespace bough {

namespace {
// Most rows for the kernel of quantized_product, which serves bf16 and the few rows of decoding. Up to this
// many rows, the kernel reads the weight once. With more rows, each CUDA thread block reads its 64 rows of x
// from the L2 cache for only 16 outputs. At an H100's rate (5.5 TB/s) this takes, from about 65 rows on, as
// long as widening the weight exactly for cuBLAS (5 bytes an element at 3.35 TB/s).
constexpr int64_t kFewRows = 64;

void quantize_rows_op(Tensor quantized_OK, Tensor scale_O, Tensor weight_OK) {
  const Launch launch("quantize_rows_", {quantized_OK, scale_O, weight_OK});
  if (weight_OK.numel() == 0) return quantize_rows_reference_(quantized_OK, scale_O, weight_OK);
  dispatch_float_types(weight_OK.scalar_type(), "quantize_rows_", [&]<class T>() {
    quantize_rows_cuda(mutable_data<int8_t>(quantized_OK), mutable_data<float>(scale_O), data<T>(weight_OK),
                       weight_OK.size(0), weight_OK.size(1), launch.stream());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

at::Tensor product_of_many_rows(Tensor x_RK, Tensor weight_OK, Tensor scale_O, const OptionalTensor& bias_O,
                                const OptionalTensor& residual_RO) {
  const auto sums_RO = at::zeros({x_RK.size(0), weight_OK.size(0)}, scale_O.options());
  add_matrix_product_(sums_RO, x_RK, weight_OK.to(x_RK.scalar_type()).t());
  sums_RO.mul_(scale_O);
  if (bias_O) sums_RO.add_(*bias_O);
  if (residual_RO) sums_RO.add_(*residual_RO);
  return sums_RO.to(x_RK.scalar_type());
}

at::Tensor quantized_product_op(Tensor x_RK, Tensor weight_OK, Tensor scale_O, const OptionalTensor& bias_O,
                                const OptionalTensor& residual_RO) {
  if (x_RK.scalar_type() != at::kBFloat16 || x_RK.numel() == 0 || weight_OK.numel() == 0)
    return quantized_product_reference(x_RK, weight_OK, scale_O, bias_O, residual_RO);
  const Launch launch("quantized_product", {x_RK, weight_OK, scale_O});
  auto y_RO = at::empty({x_RK.size(0), weight_OK.size(0)}, x_RK.options());
  using T = BFloat16Bits;
  const QuantizedProductCuda product{.y = mutable_data<T>(y_RO),
                                     .x = data<T>(x_RK),
                                     .weight = data<int8_t>(weight_OK),
                                     .scale = data<float>(scale_O),
                                     .bias = bias_O ? data<T>(*bias_O) : nullptr,
                                     .residual = residual_RO ? data<T>(*residual_RO) : nullptr,
                                     .rows = x_RK.size(0),
                                     .inputs = x_RK.size(1),
                                     .outputs = weight_OK.size(0)};
  if (product.rows > kFewRows || !fits_quantized_product_cuda(product))
    return product_of_many_rows(x_RK, weight_OK, scale_O, bias_O, residual_RO);
  quantized_product_cuda(product, launch.stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y_RO;
}
}  // namespace

}  // namespace bough

TORCH_LIBRARY_IMPL(bough, CUDA, m) {
  bough::register_cuda_kernel(m, "quantize_rows_", TORCH_FN(bough::quantize_rows_op));
  bough::register_cuda_kernel(m, "quantized_product", TORCH_FN(bough::quantized_product_op));
}
