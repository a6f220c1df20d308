// Types that torch's part and code without torch share: elements in files of one instruction set (*_isa.cpp,
// intrinsics) and in CUDA kernels, and a stream.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace bough {

// Bit-compatible with c10::BFloat16.
struct BFloat16Bits {
  uint16_t bits;
};

// cudaStream_t, without CUDA's headers.
using CudaStream = CUstream_st*;

}  // namespace bough
