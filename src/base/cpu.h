// Features of the processor, and a workaround for machines that report them wrongly.
#pragma once

#include <filesystem>
#include <string>

namespace bough {

struct CpuFeatures {
  bool intel = false;        // vendor GenuineIntel; not listed by describe()
  bool avx2 = false;         // with FMA and BMI2: x86-64-v3
  bool avx512 = false;       // F, BW, CD, DQ, VL: x86-64-v4
  bool avx512_bf16 = false;  // dot products of bf16 pairs
  bool amx_bf16 = false;     // products of bf16 tiles; true only if Linux also permits them
};

// Features of this machine's processor; all false on architectures other than x86-64. A feature counts only
// if the operating system saves its registers.
CpuFeatures cpu_features();

// The processor's name, for example "Intel(R) Xeon(R) Processor"; empty if the system does not report one.
// `root`: another root folder, for tests.
std::string cpu_model(const std::filesystem::path& root = "/");

// "avx512 avx512_bf16", for logs and calibration files.
std::string describe(const CpuFeatures& features);

// Call it first in main, before anything uses oneDNN. Some virtual machines report AMX tiles in CPUID leaf 7,
// but leave the leaf with the tile sizes (0x1D) empty. oneDNN then configures tiles without rows and dies of
// SIGILL in the first bf16 product. On such machines this function sets the environment variable
// ONEDNN_MAX_CPU_ISA to a set without AMX, unless the user has set the variable.
void apply_cpu_workarounds();

}  // namespace bough
