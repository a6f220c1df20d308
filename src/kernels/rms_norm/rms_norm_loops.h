// Loops of the CPU kernels of rms_norm.h. T is float, BFloat16Bits or double; A is its accumulator type.
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"
#include "kernels/common/isa.h"

// RMSNorm of rows of `width` elements. Backward accumulates d_weight[width]. In backward, y and residual may
// be nullptr, and y may be d_y.
BOUGH_ISA_DECLARE(template <class T, class A> void rms_norm_rows(T* y, A* rstd, const T* x, const T* weight,
                                                                 int64_t num_rows, int64_t width,
                                                                 const NormSettings& norm))
BOUGH_ISA_DECLARE(template <class T, class A>
                  void rms_norm_backward_rows(T* d_x, T* y, A* d_weight, const T* d_y, const T* x,
                                              const T* weight, const T* residual, const A* rstd,
                                              int64_t num_rows, int64_t width, double weight_offset))

namespace bough::bf16 {
// RMSNorm of rows, twice as fast as the loops above, because loads and stores are most of the work.
// has_avx512_bf16() must be true, and width a multiple of 32.
void rms_norm_rows(BFloat16Bits* y, float* rstd, const BFloat16Bits* x, const BFloat16Bits* weight,
                   int64_t num_rows, int64_t width, const NormSettings& norm);
void rms_norm_backward_rows(BFloat16Bits* d_x, BFloat16Bits* y, float* d_weight, const BFloat16Bits* d_y,
                            const BFloat16Bits* x, const BFloat16Bits* weight, const BFloat16Bits* residual,
                            const float* rstd, int64_t num_rows, int64_t width, double weight_offset);
}  // namespace bough::bf16
