// The launch of kernels and their dynamic shared memory. Kernels use only these functions for both, so that
// tests/cuda_emulation can run the kernels on a CPU with bodies of its own.
#pragma once

#include <cstdint>

namespace bough {

// Returns the block's dynamic shared memory. The alignment of 256 bytes allows changing addresses in a row of 256
// bytes by xor. Kernels of one file use the same alignment.
template <int alignment = 256>
__device__ inline char* dynamic_shared_memory() {
  extern __shared__ __align__(alignment) char bough_shared_memory[];
  return bough_shared_memory;
}

// Launches a kernel. CUDA requires a call per device to allow more than 48 KiB of shared memory. The call is
// made at every launch, so that no state is needed.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int64_t shared_bytes, cudaStream_t stream,
            const Arguments&... arguments) {
  if (shared_bytes > (48 << 10))
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  kernel<<<blocks, threads, static_cast<size_t>(shared_bytes), stream>>>(arguments...);
}

}  // namespace bough
