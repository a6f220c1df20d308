#pragma once

#include <cstdint>

#include "kernels/common/isa.h"

BOUGH_ISA_DECLARE(template <class T>
                  void swiglu_rows(T* y, const T* gate_up, int64_t num_rows, int64_t width))
// y may be d_y, d_gate_up may be gate_up.
BOUGH_ISA_DECLARE(template <class T> void swiglu_backward_rows(T* d_gate_up, T* y, const T* d_y,
                                                               const T* gate_up, int64_t num_rows,
                                                               int64_t width))
