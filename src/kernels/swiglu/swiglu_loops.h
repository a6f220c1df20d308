// Loops of the CPU kernels of swiglu.h. T is float, BFloat16Bits or double.
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"
#include "kernels/common/isa.h"

BOUGH_ISA_DECLARE(template <class T> void swiglu_rows(T* y, const T* gate_up, int64_t num_rows, int64_t width,
                                                      GateActivation activation))
// In backward y may be d_y, and d_gate_up may be gate_up.
BOUGH_ISA_DECLARE(template <class T> void swiglu_backward_rows(T* d_gate_up, T* y, const T* d_y,
                                                               const T* gate_up, int64_t num_rows,
                                                               int64_t width, GateActivation activation))

namespace bough::bf16 {
// Gated activations of rows. has_avx512_bf16() must be true, and width a multiple of 32.
void swiglu_rows(BFloat16Bits* y, const BFloat16Bits* gate_up, int64_t num_rows, int64_t width,
                 GateActivation activation);
void swiglu_backward_rows(BFloat16Bits* d_gate_up, BFloat16Bits* y, const BFloat16Bits* d_y,
                          const BFloat16Bits* gate_up, int64_t num_rows, int64_t width,
                          GateActivation activation);
}  // namespace bough::bf16
