// The functions of src/kernels/common/cuda_mma.cuh on a CPU, written from the PTX ISA.
#pragma once

#include <cuda_bf16.h>

#include <cstring>

namespace bough {

using SharedAddress = uint32_t;

// Where shared memory begins in its address space. Any multiple of 256 is possible on a GPU.
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

struct Registers {
  uint32_t r[4];
};
inline uint32_t element(const char* row, int column) {
  uint16_t x;
  std::memcpy(&x, row + 2 * column, 2);
  return x;
}

// "ldmatrix": each lane's fragment of matrix m is the elements (lane / 4, 2 * (lane % 4)) and the next one of the
// row; with .trans, row and column are exchanged. The row i of matrix m is at the address of lane 8 m + i.
template <bool transposed>
void load_matrices(uint32_t (&r)[4], SharedAddress address) {
  const char* const mine = shared_pointer(address, 16);
  constexpr auto kMeeting = transposed ? Meeting::kLoadTransposed : Meeting::kLoad;
  const auto loaded = meet_with<Registers, kMeeting>(mine, [](auto lanes) {
    for (int lane = 0; lane < kLanes; ++lane)
      for (int m = 0; m < 4; ++m) {
        const auto at = [&](int row, int column) { return element(lanes.get(8 * m + row), column); };
        const int a = lane / 4, b = 2 * (lane % 4);
        lanes.set(lane).r[m] = transposed ? at(b, a) | at(b + 1, a) << 16 : at(a, b) | at(a, b + 1) << 16;
      }
  });
  std::memcpy(r, loaded.r, sizeof r);
}

struct Factors {
  uint32_t a[4], b[2];
  float c[4];
};
struct Sums {
  float c[4];
};

// Element i of an array of registers that hold two bf16 each, the first in the lower half.
inline float bf16_element(const uint32_t* registers, int i) {
  return std::bit_cast<float>((registers[i / 2] >> (16 * (i % 2))) << 16);
}

// "Matrix Fragments for mma.m16n8k16 with floating point type": rows and columns of the elements of a lane.
inline int row_of_a(int lane, int i) {
  return lane / 4 + (i < 2 || (i >= 4 && i < 6) ? 0 : 8);
}
inline int column_of_a(int lane, int i) {
  return lane % 4 * 2 + (i & 1) + (i < 4 ? 0 : 8);
}
inline int row_of_b(int lane, int i) {
  return lane % 4 * 2 + (i & 1) + (i < 2 ? 0 : 8);
}
inline int row_of_c(int lane, int i) {
  return lane / 4 + (i < 2 ? 0 : 8);
}
inline int column_of_c(int lane, int i) {
  return lane % 4 * 2 + (i & 1);
}

struct Multiply {
  template <class AllLanes>
  void operator()(AllLanes lanes) const {
    float a[16][16], b[8][16];  // b by columns
    for (int lane = 0; lane < kLanes; ++lane) {
      const Factors& mine = lanes.get(lane);
      for (int i = 0; i < 8; ++i) a[row_of_a(lane, i)][column_of_a(lane, i)] = bf16_element(mine.a, i);
      for (int i = 0; i < 4; ++i) b[lane / 4][row_of_b(lane, i)] = bf16_element(mine.b, i);
    }
    for (int lane = 0; lane < kLanes; ++lane)
      for (int i = 0; i < 4; ++i) {
        const float *const row = a[row_of_c(lane, i)], *const column = b[column_of_c(lane, i)];
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += row[k] * column[k];
        lanes.set(lane).c[i] = lanes.get(lane).c[i] + sum;
      }
  }
};

}  // namespace emulation

inline void load_matrices(uint32_t (&r)[4], SharedAddress row) {
  emulation::load_matrices<false>(r, row);
}
inline void load_matrices_transposed(uint32_t (&r)[4], SharedAddress row) {
  emulation::load_matrices<true>(r, row);
}

inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulation::Factors factors{{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
  const auto sums = emulation::meet_with<emulation::Sums, emulation::Meeting::kMultiply>(factors, emulation::Multiply());
  std::memcpy(c, sums.c, sizeof c);
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
