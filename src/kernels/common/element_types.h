// Types shared by code with torch and code without torch (*_isa.cpp, files with intrinsics, CUDA kernels).
#pragma once

#include <cstdint>

struct CUstream_st;

namespace bough {

// bf16 as its bits, compatible with c10::BFloat16.
struct BFloat16Bits {
  uint16_t bits;
};

// Settings of an RMSNorm: y = x · rstd · (weight + weight_offset). The offset is 1 for Gemma, whose
// checkpoints store weights around 0.
struct NormSettings {
  NormSettings(double eps, double weight_offset = 0) : eps(eps), weight_offset(weight_offset) {}
  double eps;
  double weight_offset;
};

// Activation of the gate of a feed-forward layer (kernels/swiglu).
enum class GateActivation : int64_t { kSilu, kGeluTanh };

// CUDA's cudaStream_t, without CUDA's headers.
using CudaStream = CUstream_st*;

}  // namespace bough
