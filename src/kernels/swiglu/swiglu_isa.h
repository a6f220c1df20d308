#pragma once

#include <cstdint>

#include "kernels/common/isa.h"

BOUGH_ISA_DECLARE(template <class T>
                  void swiglu_rows(T* y, const T* gate_up, int64_t num_rows, int64_t width))
BOUGH_ISA_DECLARE(template <class T> void swiglu_backward_rows(T* d_gate_up, const T* d_y, const T* gate_up,
                                                               int64_t num_rows, int64_t width))
