// Functions with intrinsics that exist for AVX2 and for AVX-512, in files named *_avx2.cpp and *_avx512.cpp.
// Such a file includes neither torch nor the standard library's templates (common/isa.h).
#pragma once

#include "kernels/common/isa.h"

namespace bough {

constexpr float kLowest = -3.0e38f;  // maximum of no values; finite, so that a difference of two is not NaN

// Whether one of the two sets is there and allowed.
static inline bool has_avx() {
  return best_isa() >= Isa::kAvx2;
}

}  // namespace bough

#define BOUGH_AVX_DECLARE(...) \
  namespace bough::avx2 {      \
  __VA_ARGS__;                 \
  }                            \
  namespace bough::avx512 {    \
  __VA_ARGS__;                 \
  }

// Calls the copy for the best instruction set. has_avx() must be true.
#define BOUGH_AVX_CALL(function, ...)                                                    \
  (::bough::best_isa() == ::bough::Isa::kAvx512 ? ::bough::avx512::function(__VA_ARGS__) \
                                                : ::bough::avx2::function(__VA_ARGS__))
