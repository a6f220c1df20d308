// Loops that the compiler vectorises, once per instruction set.
//
// A file x_isa.cpp is compiled three times, with BOUGH_ISA = baseline, avx2 (x86-64-v3) and avx512 (x86-64-v4),
// and defines its functions in namespace bough::BOUGH_ISA. The caller picks the copy the CPU runs:
//   BOUGH_ISA_CALL(rms_norm_rows, arguments...)   (template arguments are deduced)
// Such a file includes neither torch nor the standard library's templates: an inline function compiled for
// AVX-512 could otherwise be the copy that the linker keeps for everyone.
#pragma once

namespace bough {

enum class Isa { kBaseline, kAvx2, kAvx512 };  // ascending

// The best instruction set that this CPU has and the environment variable BOUGH_MAX_ISA (baseline, avx2,
// avx512, avx512_bf16, amx) allows. UserError for another value.
Isa best_isa();

// Whether BOUGH_MAX_ISA allows dot products of bf16, and AMX tiles, beside AVX-512. Whether the CPU has them:
// cpu_features().
bool avx512_bf16_allowed();
bool amx_allowed();

}  // namespace bough

#define BOUGH_ISA_DECLARE(...) \
  namespace bough::baseline {  \
  __VA_ARGS__;                 \
  }                            \
  namespace bough::avx2 {      \
  __VA_ARGS__;                 \
  }                            \
  namespace bough::avx512 {    \
  __VA_ARGS__;                 \
  }

#define BOUGH_ISA_CALL(function, ...)                                                \
  do {                                                                               \
    switch (::bough::best_isa()) {                                                   \
      case ::bough::Isa::kAvx512: ::bough::avx512::function(__VA_ARGS__); break;     \
      case ::bough::Isa::kAvx2: ::bough::avx2::function(__VA_ARGS__); break;         \
      case ::bough::Isa::kBaseline: ::bough::baseline::function(__VA_ARGS__); break; \
    }                                                                                \
  } while (0)
