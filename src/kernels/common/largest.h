// The largest of some numbers, for files compiled for one instruction set. As integers in the order of the numbers: a
// reduction of those is vectorised, one of floating point that respects NaN is not. A NaN with its sign bit clear is
// larger than all, one with it set smaller.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common/element.h"

namespace bough::BOUGH_ISA {

// Int: signed, of T's size.
template <class Int, class T>
static inline Acc<T> largest_as(const T* values, int64_t count) {
  constexpr int kSign = 8 * sizeof(Int) - 1;
  constexpr Int kMagnitude = static_cast<Int>((uint64_t{1} << kSign) - 1);
  const auto in_order = [](Int bits) { return static_cast<Int>(bits ^ ((bits >> kSign) & kMagnitude)); };
  Int max = static_cast<Int>(-kMagnitude - 1);
  for (int64_t i = 0; i < count; ++i) {
    Int bits;
    std::memcpy(&bits, values + i, sizeof bits);
    const Int key = in_order(bits);
    max = key > max ? key : max;
  }
  max = in_order(max);  // its own inverse
  T value;
  std::memcpy(&value, &max, sizeof value);
  return load(&value);
}

static inline float largest(const float* values, int64_t count) {
  return largest_as<int32_t>(values, count);
}
static inline float largest(const BFloat16Bits* values, int64_t count) {
  return largest_as<int16_t>(values, count);
}
static inline double largest(const double* values, int64_t count) {
  return largest_as<int64_t>(values, count);
}

}  // namespace bough::BOUGH_ISA
