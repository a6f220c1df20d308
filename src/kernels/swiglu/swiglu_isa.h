#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"
#include "kernels/common/isa.h"

BOUGH_ISA_DECLARE(template <class T>
                  void swiglu_rows(T* y, const T* gate_up, int64_t num_rows, int64_t width))
// y may be d_y, d_gate_up may be gate_up.
BOUGH_ISA_DECLARE(template <class T> void swiglu_backward_rows(T* d_gate_up, T* y, const T* d_y,
                                                               const T* gate_up, int64_t num_rows,
                                                               int64_t width))

namespace bough::bf16 {
// The same where has_avx512_bf16(), width a multiple of 32.
void swiglu_rows(BFloat16Bits* y, const BFloat16Bits* gate_up, int64_t num_rows, int64_t width);
void swiglu_backward_rows(BFloat16Bits* d_gate_up, BFloat16Bits* y, const BFloat16Bits* d_y,
                          const BFloat16Bits* gate_up, int64_t num_rows, int64_t width);
}  // namespace bough::bf16
