#include "base/cpu.h"

#include <cstdint>
#include <cstdlib>
#include <fstream>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace bough {

#if defined(__x86_64__)
namespace {
struct Leaf {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// All zeros if the processor does not have this CPUID leaf.
Leaf cpuid(uint32_t leaf, uint32_t subleaf) {
  Leaf out;
  if (!__get_cpuid_count(leaf, subleaf, &out.eax, &out.ebx, &out.ecx, &out.edx)) return {};
  return out;
}

bool bit(uint32_t word, int index) {
  return (word >> index) & 1;
}

// XCR0: the register files that the operating system saves at a thread switch. 0 if it saves none (no xsave).
uint64_t saved_registers() {
  if (!bit(cpuid(1, 0).ecx, 27)) return 0;
  uint32_t eax, edx;
  __asm__ volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return eax | static_cast<uint64_t>(edx) << 32;
}

// Returns true if CPUID describes AMX tiles with sizes above 0. Leaf 0x1D, subleaf 1 describes palette 1: eax
// = bytes of all tiles and of one tile, ebx = bytes per tile row and number of tiles, ecx = rows per tile.
bool tiles_described() {
  if (__get_cpuid_max(0, nullptr) < 0x1D) return false;
  const Leaf palette = cpuid(0x1D, 1);
  return cpuid(0x1D, 0).eax >= 1 && palette.eax >> 16 != 0 && palette.ebx >> 16 != 0 &&
         (palette.ecx & 0xFFFF) != 0;
}

bool tiles_reported() {
  return bit(cpuid(7, 0).edx, 24);
}

// Asks Linux for AMX: only processes that ask (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) get the tile state.
bool tiles_permitted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
}  // namespace

CpuFeatures cpu_features() {
  const uint64_t saved = saved_registers();
  const bool saves_ymm = (saved & 0x6) == 0x6, saves_zmm = (saved & 0xE6) == 0xE6,
             saves_tiles = (saved >> 17 & 3) == 3;
  const Leaf basic = cpuid(1, 0), extended = cpuid(7, 0), more = cpuid(7, 1);
  CpuFeatures out;
  const Leaf vendor = cpuid(0, 0);
  out.intel = vendor.ebx == 0x756E6547 && vendor.edx == 0x49656E69 && vendor.ecx == 0x6C65746E;
  out.avx2 =
      saves_ymm && bit(extended.ebx, 5) && bit(basic.ecx, 12) && bit(extended.ebx, 8) && bit(basic.ecx, 29);
  out.avx512 = out.avx2 && saves_zmm && bit(extended.ebx, 16) && bit(extended.ebx, 17) &&
               bit(extended.ebx, 28) && bit(extended.ebx, 30) && bit(extended.ebx, 31);
  out.avx512_bf16 = out.avx512 && bit(more.eax, 5);
  out.amx_bf16 = saves_tiles && tiles_reported() && bit(extended.edx, 22) && tiles_permitted();
  return out;
}

void apply_cpu_workarounds() {
  // The last argument 0 keeps a value that the user has set.
  if (tiles_reported() && !tiles_described()) ::setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16", 0);
}
#else
CpuFeatures cpu_features() {
  return {};
}
void apply_cpu_workarounds() {}
#endif

std::string cpu_model(const std::filesystem::path& root) {
  std::ifstream info(root / "proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name"))
      if (const auto colon = line.find(": "); colon != std::string::npos) return line.substr(colon + 2);
  return {};
}

std::string describe(const CpuFeatures& features) {
  std::string out;
  const auto add = [&](bool has, const char* name) {
    if (has) (out += out.empty() ? "" : " ") += name;
  };
  add(features.avx2, "avx2");
  add(features.avx512, "avx512");
  add(features.avx512_bf16, "avx512_bf16");
  add(features.amx_bf16, "amx_bf16");
  return out.empty() ? "baseline" : out;
}

}  // namespace bough
