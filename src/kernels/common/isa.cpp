#include "kernels/common/isa.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>

#include "base/cpu.h"
#include "base/error.h"

namespace bough {

namespace {

// The values of BOUGH_MAX_ISA. Each value includes all before it. If the variable is unset or empty, the last
// one holds.
constexpr std::array<std::string_view, 5> kLimits = {"baseline", "avx2", "avx512", "avx512_bf16", "amx"};
constexpr size_t kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4;

size_t limit() {
  static const size_t limit = [] {
    const char* variable = std::getenv("BOUGH_MAX_ISA");
    const std::string_view name = variable ? variable : "";
    if (name.empty()) return kAmx;
    const auto* const found = std::find(kLimits.begin(), kLimits.end(), name);
    if (found == kLimits.end())
      throw UserError(str(
          "environment variable BOUGH_MAX_ISA: got ", quoted(name),
          ", expected baseline, avx2, avx512, avx512_bf16 or amx; unset it to use all that this CPU has"));
    return static_cast<size_t>(found - kLimits.begin());
  }();
  return limit;
}

Isa detect() {
  __builtin_cpu_init();
  Isa isa = Isa::kBaseline;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    isa = Isa::kAvx2;
  if (isa == Isa::kAvx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512cd"))
    isa = Isa::kAvx512;
  return isa;
}

}  // namespace

Isa best_isa() {
  static const Isa isa = std::min(detect(), static_cast<Isa>(std::min(limit(), kAvx512)));
  return isa;
}

bool has_avx512_bf16() {
  static const bool has = best_isa() == Isa::kAvx512 && limit() >= kAvx512Bf16 && cpu_features().avx512_bf16;
  return has;
}

bool has_amx() {
  static const bool has = has_avx512_bf16() && limit() == kAmx && cpu_features().amx_bf16;
  return has;
}

bool has_fast_bf16() {
  static const bool has =
      has_amx() || (has_avx512_bf16() && (limit() == kAvx512Bf16 || !cpu_features().intel));
  return has;
}

namespace {
// The workarounds (base/cpu.h) are applied when this library is loaded by the bough program, a test or
// Python. They must take effect before libtorch multiplies its first bf16 matrices.
[[maybe_unused]] const bool workarounds_applied = (apply_cpu_workarounds(), true);
}  // namespace

}  // namespace bough
