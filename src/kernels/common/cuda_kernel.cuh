// Helpers for the CUDA kernels: packs of elements, sums in a fixed order, launch sizes. No torch here, so
// that a kernel compiles in seconds.
//
// Elements are loaded and stored in packs of up to 16 bytes if the row length and the addresses allow it,
// otherwise one by one (kPack = 1). Loads widen to the accumulator type A, stores round once. Kernels use no
// atomics: the same input gives the same bits.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/common/cuda_launch.cuh"
#include "kernels/common/element_types.h"

namespace bough {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;  // per block: 1024 threads
constexpr int64_t kMaxBlocks = 65535;

__device__ inline float widen(float x) {
  return x;
}
__device__ inline double widen(double x) {
  return x;
}
__device__ inline float widen(BFloat16Bits x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

__device__ inline void round_to(float* p, float x) {
  *p = x;
}
__device__ inline void round_to(double* p, double x) {
  *p = x;
}
__device__ inline void round_to(BFloat16Bits* p, float x) {
  p->bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

template <class T, int kPack>
struct alignas(std::min<size_t>(16, sizeof(T) * kPack)) Pack {
  T values[kPack];
};

template <class A, class T, int kPack>
__device__ inline void load(A (&x)[kPack], const T* p) {
  const auto pack = *reinterpret_cast<const Pack<T, kPack>*>(p);
#pragma unroll
  for (int j = 0; j < kPack; ++j) x[j] = widen(pack.values[j]);
}

template <class A, class T, int kPack>
__device__ inline void store(T* p, const A (&x)[kPack]) {
  Pack<T, kPack> pack;
#pragma unroll
  for (int j = 0; j < kPack; ++j) round_to(&pack.values[j], x[j]);
  *reinterpret_cast<Pack<T, kPack>*>(p) = pack;
}

// Number of elements of a 16-byte pack.
template <class T>
constexpr int kFullPack = 16 / sizeof(T);

// Whether rows of `width` elements at these addresses may be read in packs of `pack` elements.
template <class... Pointers>
bool fits_packs(int64_t width, int pack, Pointers... pointers) {
  return width % pack == 0 && ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

// Calls function(std::integral_constant<int, k>()) with k = kPack if `fits`, else 1.
template <int kPack, class Function>
void with_pack(bool fits, Function&& function) {
  if (fits) {
    function(std::integral_constant<int, kPack>());
  } else {
    function(std::integral_constant<int, 1>());
  }
}

inline int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Returns the threads of a block: whole warps, enough for one pack per thread, at most `limit`.
inline int threads_for(int64_t num_packs, int limit) {
  return static_cast<int>(std::clamp<int64_t>(divide_up(num_packs, kWarp) * kWarp, kWarp, limit));
}

// Returns the sum over the warp. Addition is commutative, so all lanes get the same bits.
template <class A>
__device__ inline A warp_sum(A x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, offset);
  return x;
}

// Returns the sum over the block in every thread. All threads of the block must call it. scratch: shared
// memory, kMaxWarps elements.
template <class A>
__device__ inline A block_sum(A x, A* scratch) {
  x = warp_sum(x);
  __syncthreads();  // a former sum has been read from scratch
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  A sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) sum += scratch[warp];
  return sum;
}

// Second stage of a sum over rows: out[d] += sum of partial[p][d] over the parts p. A thread block has 32
// columns d of eight threads. Each thread adds every eighth part. Then a column's eight sums are added in
// order.
constexpr int kPartLanes = 8;

template <class A>
__global__ void add_parts_kernel(A* out, const A* partial, int64_t num_parts, int64_t width, int64_t stride) {
  __shared__ A sums[kPartLanes][kWarp];
  const int64_t d = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  A sum = 0;
  if (d < width) {
#pragma unroll 4
    for (int64_t p = threadIdx.y; p < num_parts; p += kPartLanes) sum += partial[p * stride + d];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || d >= width) return;
  for (int lane = 1; lane < kPartLanes; ++lane) sum += sums[lane][threadIdx.x];
  out[d] += sum;
}

// Launches add_parts_kernel. partial: num_parts rows of `width` elements, `stride` elements apart.
template <class A>
void add_parts(A* out, const A* partial, int64_t num_parts, int64_t width, int64_t stride,
               cudaStream_t stream) {
  const dim3 threads(kWarp, kPartLanes);
  const auto blocks = static_cast<unsigned>(divide_up(width, kWarp));
  launch(add_parts_kernel<A>, blocks, threads, 0, stream, out, partial, num_parts, width, stride);
}

}  // namespace bough
