// Loops that the compiler vectorizes, once per instruction set.
//
// A file x_isa.cpp is compiled three times, with BOUGH_ISA = baseline, avx2 (x86-64-v3) and avx512
// (x86-64-v4). It defines its functions in namespace bough::BOUGH_ISA. The caller selects the copy for the
// CPU:
//   BOUGH_ISA_CALL(rms_norm_rows, arguments...)   (template arguments are deduced)
// Such a file includes neither torch nor the standard library's templates. Otherwise the linker could keep
// the AVX-512 copy of an inline function for the whole program.
#pragma once

namespace bough {

enum class Isa { kBaseline, kAvx2, kAvx512 };  // ascending

// Returns the best instruction set that the CPU has and the environment variable BOUGH_MAX_ISA allows. The
// variable may be baseline, avx2, avx512, avx512_bf16 or amx; unset, it allows all. Throws UserError if it
// has another value.
Isa best_isa();

// has_avx512_bf16(): whether the CPU has AVX512-BF16 (dot products of bf16) and BOUGH_MAX_ISA allows it.
// has_amx(): whether this also holds for AMX tiles of bf16.
// has_fast_bf16(): whether products of bf16 are faster than products of fp32 copies: with AMX, or with
// AVX512-BF16 on a CPU that is not Intel's. On Intel's CPUs, dot products of bf16 have about half of fp32's
// FLOPs per second. BOUGH_MAX_ISA=avx512_bf16 makes it true there nevertheless, for tests.
bool has_avx512_bf16();
bool has_amx();
bool has_fast_bf16();

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

// Calls bf16::function if T is BFloat16Bits, has_avx512_bf16() and `fits`. Otherwise same as BOUGH_ISA_CALL.
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
