// Loops of the CPU kernels of log_prob.h and softmax_blocks.h. T is float, BFloat16Bits or double; A is its
// accumulator type.
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"
#include "kernels/common/isa.h"

// Replaces logits by d_logits, without the term of the label.
BOUGH_ISA_DECLARE(template <class T, class A>
                  void log_prob_backward_row(T* logits, int64_t width, A inverse_temperature, A lse,
                                             A entropy, A d_log_prob, A d_entropy))

// Rows of fp32 or bf16 logits with AVX-512, two vectors at a time. softmax_blocks.h and log_prob_backward_row
// document the functions.
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
