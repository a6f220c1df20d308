#include "kernels/common/isa.h"

#include <cstdlib>
#include <cstring>

namespace bough {

namespace {
Isa detect() {
  __builtin_cpu_init();
  Isa isa = Isa::kBaseline;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    isa = Isa::kAvx2;
  if (isa == Isa::kAvx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512cd"))
    isa = Isa::kAvx512;
  const char* limit = std::getenv("BOUGH_MAX_ISA");
  if (limit && !std::strcmp(limit, "baseline")) return Isa::kBaseline;
  if (limit && !std::strcmp(limit, "avx2") && isa == Isa::kAvx512) return Isa::kAvx2;
  return isa;
}
}  // namespace

Isa best_isa() {
  static const Isa isa = detect();
  return isa;
}

bool amx_allowed() {
  static const bool allowed = [] {
    const char* limit = std::getenv("BOUGH_MAX_ISA");
    return !limit || !*limit || !std::strcmp(limit, "amx");
  }();
  return allowed;
}

}  // namespace bough
