// Rows of logits in fp32 and bf16 by AVX-512: what softmax_blocks.h and log_prob_isa.h say, two vectors at a time.
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"

namespace bough::avx512 {

template <class T>
void softmax_maxima(const T* logits, int64_t width, float* maxima);
template <class T>
void softmax_sums(const T* logits, int64_t width, float maximum, float inverse_temperature, double* sums,
                  double* dots);
template <class T>
void softmax_weights(const T* logits, int64_t count, float maximum, float inverse_temperature,
                     float* weights);
template <class T>
void log_prob_backward(T* logits, int64_t width, float inverse_temperature, float lse, float entropy,
                       float d_log_prob, float d_entropy);

}  // namespace bough::avx512
