// Takes the place of CUDA's header: the language, built-in variables and functions that the kernels use.
#pragma once

#include <math.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "block.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
// One section (shared_memory.ld), so that each block can begin with filled memory. AddressSanitizer puts no
// red zones between variables of a section whose name is an identifier, hence the dot.
#define __shared__ static __attribute__((section(".bough_shared")))

#define threadIdx (::bough::emulation::thread->index)
#define blockIdx (::bough::emulation::block->index)
#define blockDim (::bough::emulation::block->size)
#define gridDim (::bough::emulation::block->grid)

struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct __nv_bfloat16 {
  unsigned short bits;
};

using std::max;
using std::min;

inline void __syncthreads() {
  bough::emulation::sync_threads();
}

inline void check_mask(unsigned mask) {
  if (mask != ~0u)
    bough::emulation::fail("a warp operation of some lanes; the emulation knows those of all lanes");
}

inline void __syncwarp(unsigned mask = ~0u) {
  using namespace bough::emulation;
  check_mask(mask);
  meet(Meeting::kSync, nullptr, nullptr, [](const void* const*, void* const*) { ++warp().syncs; });
}

namespace bough::emulation {
template <class T>
struct Shuffled {
  T value;
  int source;
};
template <Meeting meeting, class T>
T shuffle(unsigned mask, T value, int source) {
  check_mask(mask);
  return meet_with<T, meeting>(Shuffled<T>{value, source}, [](auto lanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes.set(lane) = lanes.get(lanes.get(lane).source).value;
  });
}
}  // namespace bough::emulation

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  using namespace bough::emulation;
  return shuffle<Meeting::kShuffleXor>(mask, value, thread->lane() ^ lanes);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  using namespace bough::emulation;
  const int source = thread->lane() + static_cast<int>(delta);
  return shuffle<Meeting::kShuffleDown>(mask, value, source < kLanes ? source : thread->lane());
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  using namespace bough::emulation;
  return shuffle<Meeting::kShuffle>(mask, value, lane & (kLanes - 1));
}
inline unsigned __ballot_sync(unsigned mask, bool flag) {
  using namespace bough::emulation;
  check_mask(mask);
  return meet_with<unsigned, Meeting::kBallot>(flag, [](auto lanes) {
    unsigned votes = 0;
    for (int lane = 0; lane < kLanes; ++lane) votes |= static_cast<unsigned>(lanes.get(lane)) << lane;
    for (int lane = 0; lane < kLanes; ++lane) lanes.set(lane) = votes;
  });
}

inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}
inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}
inline float __int_as_float(int x) {
  return std::bit_cast<float>(x);
}
inline int __float_as_int(float x) {
  return std::bit_cast<int>(x);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (x != x) return {0x7FFF};
  return {static_cast<unsigned short>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) {
  return x.bits;
}
// No thread is interrupted within the function. The race detector does not see it.
__attribute__((noinline, no_sanitize("thread"))) inline unsigned atomicAdd(unsigned* p, unsigned x) {
  const unsigned before = *p;
  *p += x;
  return before;
}

using cudaError_t = int;
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr /*attribute*/, int /*device*/) {
  *value = 132;  // an H100
  return 0;
}
