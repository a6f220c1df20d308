#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"
#include "kernels/common/isa.h"

// Rows of `width` elements. A is the accumulator type; d_weight[width] is added to; y (which may be d_y) and residual may
// be null.
BOUGH_ISA_DECLARE(template <class T, class A> void rms_norm_rows(T* y, A* rstd, const T* x, const T* weight,
                                                                 int64_t num_rows, int64_t width, double eps))
BOUGH_ISA_DECLARE(template <class T, class A>
                  void rms_norm_backward_rows(T* d_x, T* y, A* d_weight, const T* d_y, const T* x,
                                              const T* weight, const T* residual, const A* rstd,
                                              int64_t num_rows, int64_t width))

namespace bough::bf16 {
// The same where has_avx512_bf16(), width a multiple of 32: twice as fast, since loads and stores are most of the work.
void rms_norm_rows(BFloat16Bits* y, float* rstd, const BFloat16Bits* x, const BFloat16Bits* weight,
                   int64_t num_rows, int64_t width, double eps);
void rms_norm_backward_rows(BFloat16Bits* d_x, BFloat16Bits* y, float* d_weight, const BFloat16Bits* d_y,
                            const BFloat16Bits* x, const BFloat16Bits* weight, const BFloat16Bits* residual,
                            const float* rstd, int64_t num_rows, int64_t width);
}  // namespace bough::bf16
