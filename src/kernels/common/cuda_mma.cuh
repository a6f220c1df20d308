// Functions for PTX instructions of the tensor cores (sm_80 and up). tests/cuda_emulation has the same
// functions with bodies for a CPU.
//
// Layouts (PTX ISA, "Matrix Fragments for mma.m16n8k16"); in a warp, row = lane / 4, pair = 2 · (lane % 4):
//   A [16][16]: a0 = (row, pair), a1 = (row + 8, pair), a2 = (row, pair + 8), a3 = (row + 8, pair + 8)
//   B [16][8]:  b0 = (pair, column row), b1 = (pair + 8, column row)
//   C [16][8]:  c0, c1 = (row, pair), (row, pair + 1); c2, c3 = the same for row + 8
// Each register of A has the named element and the one in the next column, each register of B the named
// element and the one in the next row; the named element is in the lower half. Therefore C of one product,
// rounded, can be A of the next.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace bough {

using SharedAddress = uint32_t;  // bytes from the start of shared memory

__device__ inline SharedAddress shared_address(const void* p) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(p));
}

// Reads threadIdx.x again, so that the compiler computes dependent values where they are used and does not
// keep them in registers across a loop.
__device__ inline int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Starts an asynchronous copy of `bytes` bytes. If not `valid`, writes zeros and reads nothing.
template <int bytes>
__device__ inline void copy_async(SharedAddress to, const void* from, bool valid) {
  static_assert(bytes == 4 || bytes == 16);
  const int size = valid ? bytes : 0;
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(size) : "memory");
}

// Waits for this thread's copies. After the wait, a barrier makes the copies visible to the block.
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Loads four 8 x 8 matrices of 16-bit elements. Lanes 8m to 8m + 7 pass the addresses of the rows of matrix
// m. r[m] gets its elements (row, pair), (row, pair + 1), or if transposed (pair, row), (pair + 1, row).
__device__ inline void load_matrices(uint32_t (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// c += a · b with bf16 factors and fp32 sums.
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Packs two floats as bf16, rounded to nearest even.
__device__ inline uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Returns 2^x with an error of two units in the last place; 0 at minus infinity.
__device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace bough
