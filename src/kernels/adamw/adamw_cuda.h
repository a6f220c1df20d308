// Launchers of the CUDA kernels of adamw.h (cuda_launch.h).
#pragma once

#include <cstdint>

#include "kernels/adamw/adamw_loops.h"
#include "kernels/common/element_types.h"

namespace bough {

template <class T, class A>
struct AdamwArrays {
  T* value;
  A* master;  // nullptr if T is A
  A* exp_avg;
  A* exp_avg_sq;
  A* gradient;  // zeroed
  int64_t size;
};

template <class T, class A>
void adamw_cuda(const AdamwArrays<T, A>& arrays, const AdamwScalars<A>& scalars, CudaStream stream);

int64_t sum_of_squares_num_parts(int64_t size);

// Overwrites *result with the sum over x[size]. partial: scratch [sum_of_squares_num_parts(size)].
template <class T>
void sum_of_squares_cuda(double* result, double* partial, const T* x, int64_t size, CudaStream stream);

}  // namespace bough
