// Loops of the CPU kernels of adamw.h, and the scalars that the CUDA kernel also reads. T is float,
// BFloat16Bits or double; A is its accumulator type.
#pragma once

#include <cstdint>

#include "kernels/common/isa.h"

namespace bough {
// The scalars of one update, computed in fp64 and rounded to the accumulator type.
template <class A>
struct AdamwScalars {
  A gradient_scale;
  A beta1, one_minus_beta1;
  A beta2, one_minus_beta2;
  A decay;             // 1 - lr · weight_decay
  A step_size;         // lr / (1 - beta1^step)
  A inverse_variance;  // 1 / (1 - beta2^step)
  A eps;
};
}  // namespace bough

// Updates `size` elements. master is nullptr if T is A.
BOUGH_ISA_DECLARE(template <class T, class A> void adamw_elements(T* value, A* master, A* exp_avg,
                                                                  A* exp_avg_sq, A* gradient, int64_t size,
                                                                  const AdamwScalars<A>& scalars))
BOUGH_ISA_DECLARE(template <class T> void sum_of_squares_block(double* sum, const T* x, int64_t size))
