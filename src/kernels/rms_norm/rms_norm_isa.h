#pragma once

#include <cstdint>

#include "kernels/common/isa.h"

// Rows of `width` elements. A is the accumulator type; d_weight[width] is added to; y (which may be d_y) and residual may
// be null.
BOUGH_ISA_DECLARE(template <class T, class A> void rms_norm_rows(T* y, A* rstd, const T* x, const T* weight,
                                                                 int64_t num_rows, int64_t width, double eps))
BOUGH_ISA_DECLARE(template <class T, class A>
                  void rms_norm_backward_rows(T* d_x, T* y, A* d_weight, const T* d_y, const T* x,
                                              const T* weight, const T* residual, const A* rstd,
                                              int64_t num_rows, int64_t width))
