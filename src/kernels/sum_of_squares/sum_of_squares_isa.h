#pragma once

#include <cstdint>

#include "kernels/common/isa.h"

BOUGH_ISA_DECLARE(template <class T> void sum_of_squares_block(double* sum, const T* x, int64_t size))
