// sum over all elements of x², in fp64 whatever x is: what a global gradient norm is made of.
//
// Each block of kSumOfSquaresBlock elements is summed by itself and the blocks in their order, so the result
// does not depend on the number of threads. Infinite or NaN where an element is.
#pragma once

#include <ATen/core/Tensor.h>

namespace bough {

inline constexpr int64_t kSumOfSquaresBlock = 16384;

// x: fp32, fp64 or bf16, contiguous. Returns an fp64 scalar on x's device.
at::Tensor sum_of_squares(const at::Tensor& x);

// Reference, in tensor ops, any device.
at::Tensor sum_of_squares_reference(const at::Tensor& x);

}  // namespace bough
