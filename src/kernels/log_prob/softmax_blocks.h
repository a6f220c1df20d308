// Sums of the softmax of a row of logits, in blocks of kSoftmaxBlock. log_prob on the CPU and the sampler of
// generation (rollout/sampler) share them, so that their log-probabilities have the same bits. Exponentials
// and the sum of a block are in the accumulator type, in a fixed order. Blocks are added in fp64.
//
//   weight[v] = exp((logit[v] - maximum) / temperature)
#pragma once

#include <cstdint>

#include "kernels/common/simd.h"

namespace bough {

// The sums of the blocks locate the sampled token, so only one block of the row is read again.
inline constexpr int64_t kSoftmaxBlock = 256;
inline int64_t softmax_blocks(int64_t width) {
  return (width + kSoftmaxBlock - 1) / kSoftmaxBlock;
}

// T: float, BFloat16Bits, double. maxima, sums, dots: [softmax_blocks(width)]. A NaN among the logits may not
// show in the maxima, but always shows in the sums.
template <class T>
void softmax_maxima(const T* logits, int64_t width, typename simd::Types<T>::Acc* maxima);

// Sums the weights of each block. dots: sums of weight · log weight; nullptr if not wanted.
template <class T>
void softmax_sums(const T* logits, int64_t width, typename simd::Types<T>::Acc maximum,
                  typename simd::Types<T>::Acc inverse_temperature, double* sums, double* dots);

// Writes the weights of at most one block. `weights` must have space for kSoftmaxBlock values.
template <class T>
void softmax_weights(const T* logits, int64_t count, typename simd::Types<T>::Acc maximum,
                     typename simd::Types<T>::Acc inverse_temperature, typename simd::Types<T>::Acc* weights);

// log_sum: log of the sum of the weights. The difference of the logits is taken first, so that a row with one
// dominant token loses no precision to cancellation.
inline double log_probability(double logit, double maximum, double temperature, double log_sum) {
  return (logit - maximum) / temperature - log_sum;
}

}  // namespace bough
