// The functions of src/kernels/common/cuda_mma.cuh on a CPU, written from the PTX ISA.
#pragma once

#include <cuda_bf16.h>

#include <cstring>

namespace bough {

using SharedAddress = uint32_t;

// The beginning of shared memory in its address space. Any multiple of 256 is possible on a GPU.
constexpr SharedAddress kSharedBegin = 1024;

inline SharedAddress shared_address(const void* p) {
  return kSharedBegin + static_cast<SharedAddress>(static_cast<const char*>(p) - emulation::block->shared);
}

namespace emulation {
inline char* shared_pointer(SharedAddress address, int bytes) {
  const int64_t offset = int64_t{address} - kSharedBegin;
  if (offset < 0 || offset + bytes > block->shared_bytes) fail("an access beyond the dynamic shared memory");
  if (offset % bytes != 0) fail("a misaligned access of shared memory");
  return block->shared + offset;
}
}  // namespace emulation

inline int thread_index() {
  return static_cast<int>(threadIdx.x);
}

// "cp.async": the bytes arrive when the thread waits. Before, the destination holds a NaN.
template <int bytes>
inline void copy_async(SharedAddress to, const void* from, bool valid) {
  static_assert(bytes == 4 || bytes == 16);
  emulation::Copy copy{emulation::shared_pointer(to, bytes), bytes, {}};
  if (valid) {
    if (reinterpret_cast<uintptr_t>(from) % bytes != 0) emulation::fail("a misaligned source of cp.async");
    std::memcpy(copy.data, from, bytes);
  }
  std::memset(copy.to, 0xFF, bytes);
  emulation::thread->copies.push_back(copy);
}

inline void wait_for_copies() {
  for (const auto& copy : emulation::thread->copies)
    std::memcpy(copy.to, copy.data, static_cast<size_t>(copy.bytes));
  emulation::thread->copies.clear();
}

namespace emulation {

// A lane's arguments of "mma"; its results are c. Element i of a register array is in register i / 2, for
// even i in the lower half.
struct Factors {
  uint32_t a[4], b[2];
  float c[4];
};

// mma.cpp
void exchange(const void* const* rows, void* const* registers);
void exchange_transposed(const void* const* rows, void* const* registers);
void multiply_matrices(const void* const* factors, void* const* sums);

}  // namespace emulation

// "ldmatrix": each lane reads the row at its address. Then the lanes exchange elements.
namespace emulation {
struct alignas(16) Row {
  char bytes[16];
};
inline void load_fragments(uint32_t (&r)[4], SharedAddress address, bool transposed) {
  const Row row = *reinterpret_cast<const Row*>(shared_pointer(address, 16));
  meet(transposed ? Meeting::kLoadTransposed : Meeting::kLoad, &row, r,
       transposed ? exchange_transposed : exchange);
}
}  // namespace emulation

inline void load_matrices(uint32_t (&r)[4], SharedAddress row) {
  emulation::load_fragments(r, row, /*transposed=*/false);
}
inline void load_matrices_transposed(uint32_t (&r)[4], SharedAddress row) {
  emulation::load_fragments(r, row, /*transposed=*/true);
}

inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const emulation::Factors factors{{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
  emulation::meet(emulation::Meeting::kMultiply, &factors, c, emulation::multiply_matrices);
}

inline uint32_t pack_bf16(float low, float high) {
  return uint32_t{__bfloat16_as_ushort(__float2bfloat16_rn(low))} |
         uint32_t{__bfloat16_as_ushort(__float2bfloat16_rn(high))} << 16;
}

inline float exp2_approximate(float x) {
  const float y = exp2f(x);
  return y < std::numeric_limits<float>::min() ? 0 : y;  // .ftz
}

}  // namespace bough
