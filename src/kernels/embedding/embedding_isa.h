#pragma once

#include <cstdint>

#include "kernels/common/isa.h"

// sums[tokens[t]][columns] += rows[t][columns], columns [begin, end) of `width`, t ascending.
BOUGH_ISA_DECLARE(template <class T, class A>
                  void add_rows_of_tokens(A* sums, const int64_t* tokens, const T* rows, int64_t num_rows,
                                          int64_t width, int64_t begin, int64_t end))
