// Loop of the CPU kernel of embedding.h. T is float, BFloat16Bits or double; A is its accumulator type.
#pragma once

#include <cstdint>

#include "kernels/common/isa.h"

// sums[tokens[t]][column] += rows[t][column], for columns [begin, end) of `width`, in ascending t.
BOUGH_ISA_DECLARE(template <class T, class A>
                  void add_rows_of_tokens(A* sums, const int64_t* tokens, const T* rows, int64_t num_rows,
                                          int64_t width, int64_t begin, int64_t end))
