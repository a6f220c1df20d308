// exp that the compiler may vectorise (glibc's libmvec, at most 4 units in the last place), declared here because
// <cmath> would bring inline templates into files compiled for one instruction set.
#pragma once

#if defined(__x86_64__) && defined(__GLIBC__)
#define BOUGH_SIMD __attribute__((__simd__("notinbranch")))
#else
#define BOUGH_SIMD
#endif
extern "C" {
BOUGH_SIMD float expf(float) noexcept(true);
BOUGH_SIMD double exp(double) noexcept(true);
}

namespace bough::BOUGH_ISA {
static inline float vector_exp(float x) {
  return ::expf(x);
}
static inline double vector_exp(double x) {
  return ::exp(x);
}
}  // namespace bough::BOUGH_ISA
