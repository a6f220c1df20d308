// Element types inside *_isa.cpp files, which do not include torch: loads widen to the accumulator type,
// stores round once.
#pragma once

#include <cstring>

#include "kernels/common/element_types.h"

namespace bough {
namespace BOUGH_ISA {

template <class T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <class T>
using Acc = typename Accumulator<T>::type;

static inline float load(const float* p) {
  return *p;
}
static inline double load(const double* p) {
  return *p;
}
static inline float load(const BFloat16Bits* p) {
  const uint32_t bits = static_cast<uint32_t>(p->bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline void store(float* p, float value) {
  *p = value;
}
static inline void store(double* p, double value) {
  *p = value;
}
static inline void store(BFloat16Bits* p, float value) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  p->bits = static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

// Returns weight + offset. If kOffset is false, nothing is added, because an addition would make the compiler
// reorder the factors of the caller's product.
template <bool kOffset, class A, class T>
static inline A factor_of(const T* weight, A offset) {
  if constexpr (kOffset) return load(weight) + offset;
  else return load(weight);
}

}  // namespace BOUGH_ISA
}  // namespace bough
