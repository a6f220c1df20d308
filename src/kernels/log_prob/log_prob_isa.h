#pragma once

#include <cstdint>

#include "kernels/common/isa.h"

// logits become d_logits but for the label's own term.
BOUGH_ISA_DECLARE(template <class T, class A>
                  void log_prob_backward_row(T* logits, int64_t width, A inverse_temperature, A lse,
                                             A entropy, A d_log_prob, A d_entropy))
