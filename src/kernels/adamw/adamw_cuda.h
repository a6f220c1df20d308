// CUDA launcher of adamw.h. Pointers are of the device; launch errors are left to cudaGetLastError.
// T, A: float, float; BFloat16Bits, float; double, double.
#pragma once

#include <cstdint>

#include "kernels/adamw/adamw_isa.h"
#include "kernels/common/cuda_stream.h"

namespace bough {

template <class T, class A>
struct AdamwArrays {
  T* value;
  A* master;  // null: value is of type A and its own master
  A* exp_avg;
  A* exp_avg_sq;
  A* gradient;  // zeroed
  int64_t size;
};

template <class T, class A>
void adamw_cuda(const AdamwArrays<T, A>& arrays, const AdamwScalars<A>& scalars, CudaStream stream);

}  // namespace bough
