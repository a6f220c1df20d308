// CUDA launchers of quantized_product.h. Pointers are of the device; launch errors are left to cudaGetLastError.
#pragma once

#include <cstdint>

#include "kernels/common/cuda_stream.h"
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
  const BFloat16Bits* bias;      // or null
  const BFloat16Bits* residual;  // or null
  int64_t rows, inputs, outputs;
};

// Whether the kernel below takes these: addresses and a width of 16 bytes' multiples.
bool fits_quantized_product_cuda(const QuantizedProductCuda& product);
// For up to some hundred rows: each 64 of them read the weight once. Larger products leave tensor cores idle here.
void quantized_product_cuda(const QuantizedProductCuda& product, CudaStream stream);

}  // namespace bough
