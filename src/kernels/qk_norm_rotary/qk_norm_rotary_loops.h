// Loops of the CPU kernels of qk_norm_rotary.h. T is float, BFloat16Bits or double; A is its accumulator
// type.
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"
#include "kernels/common/isa.h"

namespace bough {
struct HeadRows {  // the adjacent heads of one token
  int64_t num_heads;
  int64_t head_dim;
  int64_t num_pairs;  // pairs of elements i and num_pairs + i that are rotated; at most head_dim / 2
};
}  // namespace bough

// Computes y[heads, H] from qkv. weight: [H], or nullptr for no norm. cos, sin: [num_pairs].
BOUGH_ISA_DECLARE(template <class T, class A>
                  void norm_rotate_rows(T* y, const T* qkv, const A* cos, const A* sin, const T* weight,
                                        const NormSettings& norm, const HeadRows& rows))
// Overwrites d_qkv and accumulates d_weight[H]. scratch: [H].
BOUGH_ISA_DECLARE(template <class T, class A>
                  void norm_rotate_backward_rows(T* d_qkv, A* d_weight, A* scratch, const T* d_y,
                                                 const T* qkv, const A* cos, const A* sin, const T* weight,
                                                 const NormSettings& norm, const HeadRows& rows))

namespace bough::bf16 {
// Norm and rotation. has_avx512_bf16() must be true, and head_dim = 2 · num_pairs must be 64 or 128.
void norm_rotate_rows(BFloat16Bits* y, const BFloat16Bits* qkv, const float* cos, const float* sin,
                      const BFloat16Bits* weight, const NormSettings& norm, const HeadRows& rows);
void norm_rotate_backward_rows(BFloat16Bits* d_qkv, float* d_weight, float* scratch, const BFloat16Bits* d_y,
                               const BFloat16Bits* qkv, const float* cos, const float* sin,
                               const BFloat16Bits* weight, const NormSettings& norm, const HeadRows& rows);
}  // namespace bough::bf16
