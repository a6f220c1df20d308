// What an optimizer does to parameters: the update itself, and the sum of squares that a gradient norm is
// made of.
//
// AdamW (Loshchilov and Hutter 2019), one update of one parameter. Per element, in the accumulator type:
//   g = gradient · gradient_scale
//   m = beta1 · m + (1 - beta1) · g                       (exp_avg)
//   v = beta2 · v + (1 - beta2) · g²                      (exp_avg_sq)
//   w = w · (1 - lr · weight_decay) - lr · (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)
// w is `master` where there is one, and `value` becomes it rounded once; else w is `value` itself. All are
// overwritten; the gradient is zeroed in the same pass over memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace bough {

struct AdamwState {
  at::Tensor value;       // fp32, fp64 or bf16
  at::Tensor master;      // accumulator type; undefined where value is of that type already
  at::Tensor exp_avg;     // accumulator type
  at::Tensor exp_avg_sq;  // accumulator type, no element below 0
  at::Tensor gradient;    // accumulator type
};

struct AdamwStep {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;    // 0: none
  double gradient_scale;  // clipping: at most 1
  int64_t step;           // this update's number, from 1
};

// Updates a parameter, all of whose tensors have the same sizes, are contiguous and on one device. The result
// does not depend on the number of threads.
void adamw(const AdamwState& state, const AdamwStep& step);

// What the kernels of every device compute an update with; the scalars are those of common/element_loops.h.
template <class A>
struct AdamwScalars;
template <class A>
AdamwScalars<A> adamw_scalars(const AdamwStep& step);

// Reference of adamw(), in tensor ops, any device.
void adamw_reference(const AdamwState& state, const AdamwStep& step);

// sum over all elements of x², in fp64 whatever x is: what a global gradient norm is made of.
//
// Each block of kSumOfSquaresBlock elements is summed by itself and the blocks in their order, so the result
// does not depend on the number of threads. Infinite or NaN where an element is.
inline constexpr int64_t kSumOfSquaresBlock = 16384;

// x: fp32, fp64 or bf16, contiguous. Returns an fp64 scalar on x's device.
at::Tensor sum_of_squares(const at::Tensor& x);

// Reference of sum_of_squares(), in tensor ops, any device.
at::Tensor sum_of_squares_reference(const at::Tensor& x);

}  // namespace bough
