// The functions of src/kernels/common/cuda_launch.cuh on a CPU.
#pragma once

#include "block.h"
#include "recording.h"

namespace bough {

#define BOUGH_DYNAMIC_SHARED(name, alignment) char* const name = ::bough::emulation::block->shared

inline char* dynamic_shared_memory() {
  return emulation::block->shared;
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int64_t shared_bytes,
            cudaStream_t /*stream*/, const Arguments&... arguments) {
  emulation::run_and_record([=, ... parameters = static_cast<Parameters>(arguments)] {
    emulation::run(blocks, threads, shared_bytes, [&] { kernel(parameters...); });
  });
}

}  // namespace bough
