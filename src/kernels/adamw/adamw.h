// The update of AdamW, and the sum of squares for gradient norms.
//
// AdamW (Loshchilov and Hutter 2019) updates each element of a parameter as follows, in the accumulator type:
//   g = gradient · gradient_scale
//   m = beta1 · m + (1 - beta1) · g                       (exp_avg)
//   v = beta2 · v + (1 - beta2) · g²                      (exp_avg_sq)
//   w = w · (1 - lr · weight_decay) - lr · (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)
// w is `master` if it is defined, and `value` is then set to w, rounded once. Otherwise w is `value`. All
// tensors are overwritten. The gradient is zeroed in the same pass over memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace bough {

struct AdamwState {
  at::Tensor value;       // fp32, fp64 or bf16
  at::Tensor master;      // accumulator type; undefined if value has that type
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
  double gradient_scale;  // from gradient clipping, at most 1
  int64_t step;           // number of this update, starting at 1
};

// Updates a parameter. Its tensors have the same sizes, are contiguous and on one device. The result does not
// depend on the number of threads.
void adamw(const AdamwState& state, const AdamwStep& step);

// The scalars of an update that the kernels of all devices use (defined in adamw_loops.h).
template <class A>
struct AdamwScalars;
template <class A>
AdamwScalars<A> adamw_scalars(const AdamwStep& step);

// Reference of adamw() in tensor ops, for any device.
void adamw_reference(const AdamwState& state, const AdamwStep& step);

// Number of elements that sum_of_squares() sums at a time.
inline constexpr int64_t kSumOfSquaresBlock = 16384;

// Returns the sum of x² over all elements as an fp64 scalar on x's device. x: fp32, fp64 or bf16, contiguous.
//
// Each block of kSumOfSquaresBlock elements is summed separately. Then the sums of the blocks are added in a
// fixed order. The result therefore does not depend on the number of threads. It is infinite or NaN if an
// element is.
at::Tensor sum_of_squares(const at::Tensor& x);

// Reference of sum_of_squares() in tensor ops, for any device.
at::Tensor sum_of_squares_reference(const at::Tensor& x);

}  // namespace bough
