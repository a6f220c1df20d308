// Launchers of the CUDA kernels of quantized_product.h (cuda_launch.h).
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough {

// T: float, BFloat16Bits or double.
template <class T>
void quantize_rows_cuda(int8_t* quantized, float* scale, const T* weight, int64_t rows, int64_t width,
                        CudaStream stream);

struct QuantizedProductCuda {
  BFloat16Bits* y;
  const BFloat16Bits* x;
  const int8_t* weight;
  const float* scale;
  const BFloat16Bits* bias;      // or nullptr
  const BFloat16Bits* residual;  // or nullptr
  int64_t rows, inputs, outputs;
};

// Whether quantized_product_cuda supports the product: addresses and row lengths must be multiples of 16
// bytes.
bool fits_quantized_product_cuda(const QuantizedProductCuda& product);
// Computes a product with any number of rows of x. Every 64 rows read the weight once. For more than a few
// hundred rows another kernel is better, because this one does not use the tensor cores fully.
void quantized_product_cuda(const QuantizedProductCuda& product, CudaStream stream);

}  // namespace bough
