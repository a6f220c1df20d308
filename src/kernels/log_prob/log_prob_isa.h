#pragma once

#include <cstdint>

#include "kernels/common/isa.h"

namespace bough {
template <class A>
struct SoftmaxSums {
  A max;  // of z
  A sum;  // of exp(z - max)
  A dot;  // of exp(z - max) · (z - max)
};
}  // namespace bough

BOUGH_ISA_DECLARE(template <class T, class A> void softmax_sums_row(SoftmaxSums<A>* sums, const T* logits,
                                                                    int64_t width, A inverse_temperature))
// logits become d_logits but for the label's own term.
BOUGH_ISA_DECLARE(template <class T, class A>
                  void log_prob_backward_row(T* logits, int64_t width, A inverse_temperature, A lse,
                                             A entropy, A d_log_prob, A d_entropy))
