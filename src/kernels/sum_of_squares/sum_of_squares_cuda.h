// CUDA launcher of sum_of_squares.h. Pointers are of the device; launch errors are left to cudaGetLastError.
#pragma once

#include <cstdint>

#include "kernels/common/cuda_stream.h"

namespace bough {

int64_t sum_of_squares_num_parts(int64_t size);

// *result, overwritten: the sum over x[size]. partial: scratch [sum_of_squares_num_parts(size)].
// T: float, BFloat16Bits, double.
template <class T>
void sum_of_squares_cuda(double* result, double* partial, const T* x, int64_t size, CudaStream stream);

}  // namespace bough
