#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"
#include "kernels/common/isa.h"

namespace bough {
struct HeadRows {  // of one token, beside each other
  int64_t num_heads;
  int64_t head_dim;
};
}  // namespace bough

// y[heads, H] from qkv; weight null: no norm. cos, sin: [H/2].
BOUGH_ISA_DECLARE(template <class T, class A> void norm_rotate_rows(T* y, const T* qkv, const A* cos,
                                                                    const A* sin, const T* weight, double eps,
                                                                    const HeadRows& rows))
// d_qkv overwritten; d_weight[H] added to; scratch[H].
BOUGH_ISA_DECLARE(template <class T, class A>
                  void norm_rotate_backward_rows(T* d_qkv, A* d_weight, A* scratch, const T* d_y,
                                                 const T* qkv, const A* cos, const A* sin, const T* weight,
                                                 double eps, const HeadRows& rows))

namespace bough::bf16 {
// The same where has_avx512_bf16(), heads of 64 or 128.
void norm_rotate_rows(BFloat16Bits* y, const BFloat16Bits* qkv, const float* cos, const float* sin,
                      const BFloat16Bits* weight, double eps, const HeadRows& rows);
void norm_rotate_backward_rows(BFloat16Bits* d_qkv, float* d_weight, float* scratch, const BFloat16Bits* d_y,
                               const BFloat16Bits* qkv, const float* cos, const float* sin,
                               const BFloat16Bits* weight, double eps, const HeadRows& rows);
}  // namespace bough::bf16
