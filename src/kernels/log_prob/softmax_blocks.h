// Sums of a softmax over a row of logits, kSoftmaxBlock of them at a time: what log_prob on the CPU and the
// sampler of generation (rollout/sampler) share, so that their log-probabilities are the same bits.
// Exponentials and the sum of a block are of the accumulator type, in a fixed order; blocks are added in
// fp64.
//
//   weight[v] = exp((logit[v] - maximum) / temperature)
#pragma once

#include <cstdint>

#include "kernels/common/simd.h"

namespace bough {

// The block with the drawn token is found without a second pass over the row.
inline constexpr int64_t kSoftmaxBlock = 256;
inline int64_t softmax_blocks(int64_t width) {
  return (width + kSoftmaxBlock - 1) / kSoftmaxBlock;
}

// T: float, BFloat16Bits, double. maxima, sums, dots: [softmax_blocks(width)]. A NaN need not show in the
// maxima, but does in the sums.
template <class T>
void softmax_maxima(const T* logits, int64_t width, typename simd::Types<T>::Acc* maxima);

// Sums the weights of each block. dots: sums of weight · log weight; may be null.
template <class T>
void softmax_sums(const T* logits, int64_t width, typename simd::Types<T>::Acc maximum,
                  typename simd::Types<T>::Acc inverse_temperature, double* sums, double* dots);

// Writes the weights of at most one block; `weights` has room for kSoftmaxBlock.
template <class T>
void softmax_weights(const T* logits, int64_t count, typename simd::Types<T>::Acc maximum,
                     typename simd::Types<T>::Acc inverse_temperature, typename simd::Types<T>::Acc* weights);

// log_sum: log of the sum of weights. The difference is taken first, so that a confident row loses nothing to
// cancellation.
inline double log_probability(double logit, double maximum, double temperature, double log_sum) {
  return (logit - maximum) / temperature - log_sum;
}

}  // namespace bough
