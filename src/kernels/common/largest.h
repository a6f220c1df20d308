// The largest of some numbers, for files compiled for one instruction set. As integers in the order of the numbers: a
// reduction of those is vectorised, one of floating point that respects NaN is not. A NaN with its sign bit clear is
// larger than all, one with it set smaller.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common/element_types.h"

namespace bough::BOUGH_ISA {

static inline float largest(const float* values, int64_t count) {
  int32_t max = INT32_MIN;
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, values + i, 4);
    const int32_t key = bits ^ ((bits >> 31) & INT32_MAX);
    max = key > max ? key : max;
  }
  max ^= (max >> 31) & INT32_MAX;
  float value;
  std::memcpy(&value, &max, 4);
  return value;
}

static inline float largest(const BFloat16Bits* values, int64_t count) {
  int16_t max = INT16_MIN;
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = static_cast<int16_t>(values[i].bits);
    const auto key = static_cast<int16_t>(bits ^ ((bits >> 15) & INT16_MAX));
    max = key > max ? key : max;
  }
  max = static_cast<int16_t>(max ^ ((max >> 15) & INT16_MAX));
  const uint32_t wide = static_cast<uint32_t>(static_cast<uint16_t>(max)) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

static inline double largest(const double* values, int64_t count) {
  int64_t max = INT64_MIN;
  for (int64_t i = 0; i < count; ++i) {
    int64_t bits;
    std::memcpy(&bits, values + i, 8);
    const int64_t key = bits ^ ((bits >> 63) & INT64_MAX);
    max = key > max ? key : max;
  }
  max ^= (max >> 63) & INT64_MAX;
  double value;
  std::memcpy(&value, &max, 8);
  return value;
}

}  // namespace bough::BOUGH_ISA
