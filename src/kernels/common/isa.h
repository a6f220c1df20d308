// Loops that the compiler vectorises, once per instruction set.
//
// A file x_isa.cpp is compiled three times, with BOUGH_ISA = baseline, avx2 (x86-64-v3) and avx512
// (x86-64-v4), and defines its functions in namespace bough::BOUGH_ISA. The caller picks the copy the CPU
// runs:
//   BOUGH_ISA_CALL(rms_norm_rows, arguments...)   (template arguments are deduced)
// Such a file includes neither torch nor the standard library's templates: an inline function compiled for
// AVX-512 could otherwise be the copy that the linker keeps for everyone.
#pragma once

namespace bough {

enum class Isa { kBaseline, kAvx2, kAvx512 };  // ascending

// The best instruction set that this CPU has and the environment variable BOUGH_MAX_ISA (baseline, avx2,
// avx512, avx512_bf16, amx) allows. UserError for another value.
Isa best_isa();

// Whether the CPU has, and BOUGH_MAX_ISA allows, beside AVX-512: dot products of bf16; AMX tiles, too.
bool has_avx512_bf16();
bool has_amx();

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

// Calls the function of that name in namespace bf16 where T is BFloat16Bits, the CPU has AVX512-BF16 and
// `fits`; else as BOUGH_ISA_CALL.
#define BOUGH_BF16_OR_ISA_CALL(T, fits, function, ...)        \
  do {                                                        \
    if constexpr (std::is_same_v<T, ::bough::BFloat16Bits>) { \
      if ((fits) && ::bough::has_avx512_bf16()) {             \
        ::bough::bf16::function(__VA_ARGS__);                 \
        break;                                                \
      }                                                       \
    }                                                         \
    BOUGH_ISA_CALL(function, __VA_ARGS__);                    \
  } while (0)
