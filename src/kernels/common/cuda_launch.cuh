// The launch of kernels and their dynamic shared memory. Kernels use only these functions for both, so that
// tests/cuda_emulation can run the kernels on a CPU with bodies of its own.
#pragma once

#include <cstdint>

namespace bough {

// Declares the block's dynamic shared memory. A macro: with a function, ptxas schedules some kernels
// differently.
#define BOUGH_DYNAMIC_SHARED(name, alignment) \
  extern __shared__ __align__(alignment)      \
  char name[]

// Returns the block's dynamic shared memory. The alignment allows changing addresses in a row of 256 bytes
// by xor.
__device__ inline char* dynamic_shared_memory() {
  BOUGH_DYNAMIC_SHARED(bough_shared_memory, 256);
  return bough_shared_memory;
}

// Launches a kernel. CUDA requires a call per device to allow more than 48 KiB of shared memory. The call is
// made at every launch, so that no state is needed.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int64_t shared_bytes,
            cudaStream_t stream, const Arguments&... arguments) {
  if (shared_bytes > (48 << 10))
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  kernel<<<blocks, threads, static_cast<size_t>(shared_bytes), stream>>>(arguments...);
}

}  // namespace bough
