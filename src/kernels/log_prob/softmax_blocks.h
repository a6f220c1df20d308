// Sums of the softmax of a row of logits, in blocks of kSoftmaxBlock tokens. log_prob on the CPU and the
// sampler of generation (rollout/sampler) both use this code, so that their log-probabilities have the same
// bits. Exponentials and the sum of a block are in the accumulator type, in a fixed order. Callers add blocks
// in fp64.
//
//   weight[v] = exp((logit[v] - maximum) / temperature)
#pragma once

#include <cstdint>

#include "kernels/common/simd.h"

namespace bough {

// The sampler finds the block of the sampled token by the blocks' sums, and reads only this block again.
inline constexpr int64_t kSoftmaxBlock = 256;
inline int64_t softmax_blocks(int64_t width) {
  return (width + kSoftmaxBlock - 1) / kSoftmaxBlock;
}

// T: float, BFloat16Bits, double. maxima, sums, dots: [softmax_blocks(width)]. If a logit is NaN, the maxima
// may miss it, but a sum is NaN.
template <class T>
void softmax_maxima(const T* logits, int64_t width, typename simd::Types<T>::Acc* maxima);

// Writes the sum of the weights of each block. maximum: the row's largest logit. dots: sums of weight · log
// weight of each block, or nullptr if not wanted.
template <class T>
void softmax_sums(const T* logits, int64_t width, typename simd::Types<T>::Acc maximum,
                  typename simd::Types<T>::Acc inverse_temperature, double* sums, double* dots);

// Writes the weights of `count` tokens of one block. `weights` must have space for kSoftmaxBlock elements.
template <class T>
void softmax_weights(const T* logits, int64_t count, typename simd::Types<T>::Acc maximum,
                     typename simd::Types<T>::Acc inverse_temperature, typename simd::Types<T>::Acc* weights);

// log_sum: log of the sum of the weights. logit - maximum is computed first, so that a row of logits with one
// dominant token loses no precision to cancellation.
inline double log_probability(double logit, double maximum, double temperature, double log_sum) {
  return (logit - maximum) / temperature - log_sum;
}

}  // namespace bough
