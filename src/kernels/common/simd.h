// Vectors of sixteen lanes, written with GCC's vector types. The same source becomes AVX-512, AVX2 or SSE2,
// by the target of the function that it is inlined into. BOUGH_ON_BEST_ISA compiles a function body three
// times and selects one at run time. Vectors are passed by reference, because their ABI depends on the
// instruction set.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/common/element_types.h"
#include "kernels/common/isa.h"

#define BOUGH_INLINE inline __attribute__((always_inline))

// Defines void NAME##_avx512, _avx2 and _baseline (PARAMETERS), which call BODY, and NAME, which calls the
// best. In BODY kVectorBytes is the size of the instruction set's vectors; GCC 12 keeps larger ones in
// memory.
#define BOUGH_ON_BEST_ISA(NAME, PARAMETERS, ARGUMENTS, BODY)                                             \
  __attribute__((target(                                                                                 \
      "avx512f,avx512bw,avx512vl,avx512dq,avx512cd,avx2,fma,bmi2,prefer-vector-width=512"))) static void \
      NAME##_avx512 PARAMETERS {                                                                         \
    [[maybe_unused]] constexpr int64_t kVectorBytes = 64;                                                \
    BODY ARGUMENTS;                                                                                      \
  }                                                                                                      \
  __attribute__((target("avx2,fma,bmi2"))) static void NAME##_avx2 PARAMETERS {                          \
    [[maybe_unused]] constexpr int64_t kVectorBytes = 32;                                                \
    BODY ARGUMENTS;                                                                                      \
  }                                                                                                      \
  static void NAME##_baseline PARAMETERS {                                                               \
    [[maybe_unused]] constexpr int64_t kVectorBytes = 16;                                                \
    BODY ARGUMENTS;                                                                                      \
  }                                                                                                      \
  static void NAME PARAMETERS {                                                                          \
    switch (best_isa()) {                                                                                \
      case Isa::kAvx512: return NAME##_avx512 ARGUMENTS;                                                 \
      case Isa::kAvx2: return NAME##_avx2 ARGUMENTS;                                                     \
      case Isa::kBaseline: return NAME##_baseline ARGUMENTS;                                             \
    }                                                                                                    \
  }

namespace bough::simd {

constexpr int64_t kLanes = 16;

typedef float Float16 __attribute__((vector_size(64)));
typedef int32_t Int16 __attribute__((vector_size(64)));
typedef uint32_t UInt16 __attribute__((vector_size(64)));
typedef uint16_t Half16 __attribute__((vector_size(32)));
typedef double Double16 __attribute__((vector_size(128)));
typedef int64_t Long16 __attribute__((vector_size(128)));

// For an element type: the accumulator type, a vector of it, and a vector of integers of the same width.
template <class T>
struct Types {
  using Acc = float;
  using Vector = Float16;
  using Integers = Int16;
};
template <>
struct Types<double> {
  using Acc = double;
  using Vector = Double16;
  using Integers = Long16;
};

BOUGH_INLINE void load(Float16& v, const float* p) {
  std::memcpy(&v, p, sizeof v);
}
BOUGH_INLINE void load(Double16& v, const double* p) {
  std::memcpy(&v, p, sizeof v);
}
BOUGH_INLINE void load(Float16& v, const BFloat16Bits* p) {
  Half16 half;
  std::memcpy(&half, p, sizeof half);
  const UInt16 bits = __builtin_convertvector(half, UInt16) << 16;
  std::memcpy(&v, &bits, sizeof v);
}
template <class Vector, class A>
BOUGH_INLINE void store(A* p, const Vector& v) {
  std::memcpy(p, &v, sizeof v);
}

BOUGH_INLINE float widen(float x) {
  return x;
}
BOUGH_INLINE double widen(double x) {
  return x;
}
BOUGH_INLINE float widen(BFloat16Bits x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
BOUGH_INLINE void narrow(float& y, float x) {
  y = x;
}
BOUGH_INLINE void narrow(double& y, double x) {
  y = x;
}
BOUGH_INLINE void narrow(BFloat16Bits& y, float x) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  y.bits = is_nan ? 0x7FC0u : static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// A vector of `lanes` elements, and one of integers of the same width.
template <class A, int64_t lanes>
struct VectorOf {
  using Integer = std::conditional_t<sizeof(A) == 8, int64_t, int32_t>;
  typedef A Vector __attribute__((vector_size(lanes * sizeof(A))));
  typedef Integer Integers __attribute__((vector_size(lanes * sizeof(A))));
};
template <class Vector>
using ElementOf = std::remove_cvref_t<decltype(std::declval<Vector&>()[0])>;
template <class Vector>
using Like = VectorOf<ElementOf<Vector>, sizeof(Vector) / sizeof(ElementOf<Vector>)>;

template <class Half, class Vector>
BOUGH_INLINE void halve(Half& low, Half& high, const Vector& v) {
  static_assert(sizeof(Vector) == 2 * sizeof(Half));
  std::memcpy(&low, &v, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
}

// Reduce the lanes by halving, in the same order for all instruction sets. (GCC 12 at -O2 neither unrolls nor
// vectorizes a loop over the lanes.)
template <class Vector>
BOUGH_INLINE auto sum_of(const Vector& v) {
  using A = ElementOf<Vector>;
  constexpr int64_t kHalf = sizeof(Vector) / sizeof(A) / 2;
  if constexpr (kHalf == 1) {
    return v[0] + v[1];
  } else {
    typename VectorOf<A, kHalf>::Vector low, high;
    halve(low, high, v);
    low += high;
    return sum_of(low);
  }
}
// sums = {sum_of(a), sum_of(b), sum_of(c), sum_of(d)}, with the same bits.
template <class Sums, class Vector>
BOUGH_INLINE void sums_of(Sums& sums, const Vector& a, const Vector& b, const Vector& c, const Vector& d) {
  using A = ElementOf<Vector>;
  constexpr int64_t kHalf = sizeof(Vector) / sizeof(A) / 2;
  if constexpr (kHalf == 2) {
    using Indices = typename Like<Vector>::Integers;
    const Vector ab = __builtin_shuffle(a, b, Indices{0, 4, 1, 5}),
                 cd = __builtin_shuffle(c, d, Indices{0, 4, 1, 5}),
                 high_ab = __builtin_shuffle(a, b, Indices{2, 6, 3, 7}),
                 high_cd = __builtin_shuffle(c, d, Indices{2, 6, 3, 7});
    const Vector even = ab + high_ab, other = cd + high_cd;
    sums = __builtin_shuffle(even, other, Indices{0, 1, 4, 5}) +
           __builtin_shuffle(even, other, Indices{2, 3, 6, 7});
  } else {
    typename VectorOf<A, kHalf>::Vector low[4], high[4];
    halve(low[0], high[0], a);
    halve(low[1], high[1], b);
    halve(low[2], high[2], c);
    halve(low[3], high[3], d);
    for (int i = 0; i < 4; ++i) low[i] += high[i];
    sums_of(sums, low[0], low[1], low[2], low[3]);
  }
}
template <class Vector>
BOUGH_INLINE auto max_of(const Vector& v) {
  using A = ElementOf<Vector>;
  constexpr int64_t kHalf = sizeof(Vector) / sizeof(A) / 2;
  if constexpr (kHalf == 1) {
    const A first = v[0], second = v[1];
    return first < second ? second : first;
  } else {
    typename VectorOf<A, kHalf>::Vector low, high;
    halve(low, high, v);
    low = low < high ? high : low;
    return max_of(low);
  }
}

// GCC 12 compiles comparisons of vectors wider than the machine's to scalar code. The functions below use bit
// operations instead. sign_mask() sets all bits of the lanes in which the sign bit of x is set.
template <class Integers, class Vector>
BOUGH_INLINE void sign_mask(Integers& mask, const Vector& x) {
  std::memcpy(&mask, &x, sizeof mask);
  mask >>= 8 * sizeof(ElementOf<Vector>) - 1;
}
// x <- mask ? other : x
template <class Vector, class Integers>
BOUGH_INLINE void replace(Vector& x, const Integers& mask, const Vector& other) {
  Integers mine, theirs;
  std::memcpy(&mine, &x, sizeof mine);
  std::memcpy(&theirs, &other, sizeof theirs);
  mine = (mine & ~mask) | (theirs & mask);
  std::memcpy(&x, &mine, sizeof x);
}
// x <- max(x, other). Equal infinities give that infinity.
template <class Integers, class Vector>
BOUGH_INLINE void raise_to(Vector& x, const Vector& other) {
  Integers mask;
  sign_mask(mask, Vector(x - other));
  replace(x, mask, other);
}
// Sets all bits of the lanes where x is not a number.
BOUGH_INLINE void nan_mask(Int16& mask, const Float16& x) {
  std::memcpy(&mask, &x, sizeof mask);
  mask = (0x7F800000 - (mask & 0x7FFFFFFF)) >> 31;
}
BOUGH_INLINE void nan_mask(Long16& mask, const Double16& x) {
  std::memcpy(&mask, &x, sizeof mask);
  mask = (0x7FF0000000000000 - (mask & 0x7FFFFFFFFFFFFFFF)) >> 63;
}

// x <- exp(x) for x <= 0, with an error below 2 units in the last place. Below the exponent range, and at
// -infinity, the result is 0. exp(x) = 2^n exp(r) with |r| <= log(2) / 2 and the Taylor polynomial of
// exp(r). Adding 1.5 * 2^(mantissa bits) rounds to an integer and leaves the integer in the low bits.
template <class Vector>
requires(std::is_same_v<ElementOf<Vector>, float>) BOUGH_INLINE void exp_nonpositive(Vector& x) {
  const Vector smallest = Vector{} - 87.0f;
  typename Like<Vector>::Integers vanishes;
  sign_mask(vanishes, Vector(x - smallest));
  Vector clamped = x;
  replace(clamped, vanishes, smallest);
  const Vector shifted = clamped * 1.44269504088896341f + 12582912.0f;
  const Vector n = shifted - 12582912.0f;
  Vector r = clamped - n * 0.693359375f;  // log(2) in two parts, the first exact when multiplied by n
  r = r + n * 2.12194440e-4f;
  Vector p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  typename Like<Vector>::Integers exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  exponent = (exponent - 0x4B400000 + 127) << 23;
  Vector scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  x = p * scale;
  replace(x, vanishes, Vector{});
}
template <class Vector>
requires(std::is_same_v<ElementOf<Vector>, double>) BOUGH_INLINE void exp_nonpositive(Vector& x) {
  const Vector smallest = Vector{} - 708.0;
  typename Like<Vector>::Integers vanishes;
  sign_mask(vanishes, Vector(x - smallest));
  Vector clamped = x;
  replace(clamped, vanishes, smallest);
  const Vector shifted = clamped * 1.4426950408889634074 + 6755399441055744.0;
  const Vector n = shifted - 6755399441055744.0;
  Vector r = clamped - n * 6.93147180369123816490e-01;
  r = r - n * 1.90821492927058770002e-10;
  Vector p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  typename Like<Vector>::Integers exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  exponent = (exponent - 0x4338000000000000 + 1023) << 52;
  Vector scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  x = p * scale;
  replace(x, vanishes, Vector{});
}

}  // namespace bough::simd
