#pragma once

#include <cstdint>

#include "kernels/common/isa.h"

namespace bough {
struct HeadRows {  // heads of `num_rows` tokens inside the fused projection
  int64_t num_rows;
  int64_t num_heads;
  int64_t head_dim;
  int64_t qkv_stride;  // elements between the tokens of qkv
};
}  // namespace bough

// y[rows, heads, H] from qkv; weight null: no norm. cos, sin: [rows, H/2].
BOUGH_ISA_DECLARE(template <class T, class A> void norm_rotate_rows(T* y, const T* qkv, const A* cos,
                                                                    const A* sin, const T* weight, double eps,
                                                                    const HeadRows& rows))
// d_qkv overwritten; d_weight[H] added to; scratch[H].
BOUGH_ISA_DECLARE(template <class T, class A>
                  void norm_rotate_backward_rows(T* d_qkv, A* d_weight, A* scratch, const T* d_y,
                                                 const T* qkv, const A* cos, const A* sin, const T* weight,
                                                 double eps, const HeadRows& rows))
