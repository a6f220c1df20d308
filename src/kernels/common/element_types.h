// Types that torch's part and code without torch share: elements in files of one instruction set (*_isa.cpp,
// intrinsics) and in CUDA kernels, what ops may be asked for, and a stream.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace bough {

// bf16 as its bits, compatible with c10::BFloat16.
struct BFloat16Bits {
  uint16_t bits;
};

// Settings of an RMSNorm: y = x · rstd · (weight + weight_offset). Gemma's checkpoints hold weights around 0:
// offset 1.
struct NormSettings {
  NormSettings(double eps, double weight_offset = 0) : eps(eps), weight_offset(weight_offset) {}
  double eps;
  double weight_offset;
};

// What a feed-forward layer's gate goes through (kernels/swiglu).
enum class GateActivation : int64_t { kSilu, kGeluTanh };

// CUDA's cudaStream_t, without CUDA's headers.
using CudaStream = CUstream_st*;

}  // namespace bough
