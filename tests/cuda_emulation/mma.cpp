// "ldmatrix" and "mma" over the arguments of all lanes, written from the PTX ISA. Compiled without
// sanitizers, for speed.
#include <kernels/common/cuda_mma.cuh>

namespace bough::emulation {
namespace {

// Each lane's fragment of matrix m is the elements (lane / 4, 2 * (lane % 4)) and the next one of the row;
// with .trans, row and column are exchanged. Lane 8 m + i has row i of matrix m.
template <bool transposed>
void exchange_elements(const void* const* rows, void* const* registers) {
  for (int lane = 0; lane < kLanes; ++lane)
    for (int m = 0; m < 4; ++m) {
      const auto at = [&](int row, int column) {
        uint16_t x;
        std::memcpy(&x, static_cast<const char*>(rows[8 * m + row]) + 2 * column, 2);
        return uint32_t{x};
      };
      const int a = lane / 4, b = 2 * (lane % 4);
      static_cast<uint32_t*>(registers[lane])[m] =
          transposed ? at(b, a) | at(b + 1, a) << 16 : at(a, b) | at(a, b + 1) << 16;
    }
}

float bf16_element(const uint32_t* registers, int i) {
  return std::bit_cast<float>((registers[i / 2] >> (16 * (i % 2))) << 16);
}

// "Matrix Fragments for mma.m16n8k16 with floating point type": rows and columns of the elements of a lane.
int row_of_a(int lane, int i) {
  return lane / 4 + (i < 2 || (i >= 4 && i < 6) ? 0 : 8);
}
int column_of_a(int lane, int i) {
  return lane % 4 * 2 + (i & 1) + (i < 4 ? 0 : 8);
}
int row_of_b(int lane, int i) {
  return lane % 4 * 2 + (i & 1) + (i < 2 ? 0 : 8);
}
int column_of_b(int lane) {
  return lane / 4;
}
int row_of_c(int lane, int i) {
  return lane / 4 + (i < 2 ? 0 : 8);
}
int column_of_c(int lane, int i) {
  return lane % 4 * 2 + (i & 1);
}

}  // namespace

void exchange(const void* const* rows, void* const* registers) {
  exchange_elements<false>(rows, registers);
}
void exchange_transposed(const void* const* rows, void* const* registers) {
  exchange_elements<true>(rows, registers);
}

// The products are exact in fp32. Their sum over k is added to c. A GPU may add in another order.
void multiply_matrices(const void* const* factors, void* const* sums) {
  float a[16][16], b[16][8], c[16][8] = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto& mine = *static_cast<const Factors*>(factors[lane]);
    for (int i = 0; i < 8; ++i) a[row_of_a(lane, i)][column_of_a(lane, i)] = bf16_element(mine.a, i);
    for (int i = 0; i < 4; ++i) b[row_of_b(lane, i)][column_of_b(lane)] = bf16_element(mine.b, i);
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < kLanes; ++lane)
    for (int i = 0; i < 4; ++i)
      static_cast<float*>(sums[lane])[i] =
          static_cast<const Factors*>(factors[lane])->c[i] + c[row_of_c(lane, i)][column_of_c(lane, i)];
}

}  // namespace bough::emulation
