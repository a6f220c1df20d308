// exp that the compiler vectorizes, for files compiled for one instruction set. These cannot include <cmath>,
// because it has inline templates (see isa.h).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GLIBC__)
#define BOUGH_SIMD __attribute__((__simd__("notinbranch")))
#else
#define BOUGH_SIMD
#endif
extern "C" {
BOUGH_SIMD double exp(double) noexcept(true);  // glibc's libmvec: error at most 4 units in the last place
}

namespace bough::BOUGH_ISA {

// exp(x) = 2^n · exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2.
//   - ln 2 is split in two parts. The first has a short mantissa, so n times it is exact (Cody and Waite).
//   - exp(r) is its series up to r^7 / 7!.
//   - The error is within 3 units in the last place with FMA, 31 without (the compiler then adds the two
//     parts of ln 2).
//   - Above 88.3 the result may be infinity. -infinity gives 0. NaN stays NaN.
// The function is inlined and has no branches, so loops over it are vectorized. This is twice as fast as
// calls of the vector library from a loop that must save its registers.
static inline float vector_exp(float x) {
  constexpr float kSmallest = -110.0f, kLargest = 89.0f;  // outside, the result is 0 or infinity
  x = x < kSmallest ? kSmallest : x;
  x = x > kLargest ? kLargest : x;
  constexpr float kOffset = 160.0f;  // makes n positive: truncation is then rounding down
  const auto n = static_cast<int32_t>(x * 1.44269504f + (kOffset + 0.5f));
  const float whole = static_cast<float>(n) - kOffset;
  const float r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  float series = 1.98412698e-4f;
  series = series * r + 1.38888889e-3f;
  series = series * r + 8.33333333e-3f;
  series = series * r + 4.16666667e-2f;
  series = series * r + 1.66666667e-1f;
  series = series * r + 0.5f;
  series = series * r * r + r + 1.0f;
  // 2^n is computed as two factors, because n reaches 128 and -159.
  const auto u = static_cast<uint32_t>(n);
  const uint32_t bits_a = ((u >> 1) + 47u) << 23, bits_b = (u - (u >> 1) + 47u) << 23;
  float a, b;
  std::memcpy(&a, &bits_a, 4);
  std::memcpy(&b, &bits_b, 4);
  return series * a * b;
}
static inline double vector_exp(double x) {
  return ::exp(x);
}

// 1 / (1 + exp(-x)) within 1e-5, for results that are rounded to bf16. It takes half the instructions of
// 1 / (1 + vector_exp(-x)): a polynomial of degree 4 for exp, and two Newton steps from an estimate of the
// reciprocal's bits. x is clamped to +-86. NaN stays NaN.
static inline float rough_sigmoid(float x) {
  constexpr float kLargest = 86.0f, kOffset = 160.0f;
  float t = -x;
  t = t < -kLargest ? -kLargest : t;
  t = t > kLargest ? kLargest : t;
  const auto n = static_cast<int32_t>(t * 1.44269504f + (kOffset + 0.5f));
  const float r = t - (static_cast<float>(n) - kOffset) * 0.693147181f;
  float series = 4.145860672e-2f;
  series = series * r + 1.679090708e-1f;
  series = series * r + 5.000435710e-1f;
  series = series * r + 9.999634027e-1f;
  series = series * r + 9.999992847e-1f;
  const auto power_bits = (static_cast<uint32_t>(n) - 160u + 127u) << 23;
  float power;
  std::memcpy(&power, &power_bits, 4);
  const float sum = 1 + series * power;
  uint32_t bits;
  std::memcpy(&bits, &sum, 4);
  bits = 0x7EF311C7u - bits;
  float reciprocal;
  std::memcpy(&reciprocal, &bits, 4);
  reciprocal *= 2 - sum * reciprocal;
  return reciprocal * (2 - sum * reciprocal);
}

}  // namespace bough::BOUGH_ISA
