// Loops of the CPU kernels of experts.h. T is float, BFloat16Bits or double; A is its accumulator type.
#pragma once

#include <cstdint>

#include "kernels/common/element_types.h"
#include "kernels/common/isa.h"

// y[t] = residual[t] + sum_k weights[t,k] · rows[places[t,k]], `width` elements each. weights == nullptr: all
// 1. residual == nullptr: 0. `sums`: scratch of `width` elements.
BOUGH_ISA_DECLARE(template <class T, class A>
                  void add_weighted_rows(T* y, const T* rows, const int64_t* places, const A* weights,
                                         const T* residual, int64_t num_tokens, int64_t num_chosen,
                                         int64_t width, A* sums))
// For each row p: d_weights[p] = d_a[p] · a[p], then a[p] *= weights[p] and d_gate_up[p] *= weights[p]. a and
// d_a have `width` elements a row, d_gate_up twice as many.
BOUGH_ISA_DECLARE(template <class T, class A> void weigh_rows(A* d_weights, T* a, T* d_gate_up, const T* d_a,
                                                              const A* weights, int64_t num_rows,
                                                              int64_t width))
