// Asks the NVIDIA driver about itself and its GPUs, through NVML (libnvidia-ml.so.1) and the driver's CUDA
// library (libcuda.so.1). Both are opened at run time. Neither Bough's CUDA library nor libtorch_cuda is
// needed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"

namespace bough {

struct GpuProcess {
  int64_t pid = 0;     // on the host, not in the container
  int64_t bytes = -1;  // -1: unknown
};

// A value of -1 is unknown: this GPU or driver does not report it.
struct Gpu {
  std::string name;
  std::string error;              // if set, NVML cannot read this GPU, and the other fields are meaningless
  int major = -1, minor = -1;     // compute capability
  int64_t total = -1, free = -1;  // bytes of memory
  bool lists_processes = false;
  std::vector<GpuProcess> processes;  // that compute on it
  int persistence_mode = -1;          // 0 off, 1 on
  int mig_mode = -1;                  // 0 off, 1 on
  int compute_mode = -1;              // 0 default, 2 prohibited, 3 one process only
  int64_t uncorrected_errors = -1;    // ECC errors since the driver was loaded
  int rows_pending = -1;              // 1: memory rows are replaced at the next reset
  int nvlinks = 0;                    // active links
};

// Values of DriverFacts::cuda_code besides CUresult's.
inline constexpr int kNoCudaLibrary = -1;      // libcuda.so.1 cannot be opened
inline constexpr int kDriverQueryFailed = -2;  // the process that asked CUDA crashed or hung

struct DriverFacts {
  std::string nvml_error;  // why NVML did not answer; "" if it did
  std::string version;     // of the kernel driver, such as "580.65.06"
  std::vector<Gpu> gpus;   // all that NVML sees, whatever CUDA_VISIBLE_DEVICES says; without NVML, CUDA's

  std::string cuda_error;               // why CUDA cannot be used; "" if it can
  int cuda_code = 0;                    // the CUresult that belongs to it, or a value above
  int cuda_version = 0;                 // of libcuda.so.1, such as 13000; 0: unknown
  int cuda_gpus = 0;                    // that CUDA may use, after CUDA_VISIBLE_DEVICES
  std::vector<std::vector<int>> peers;  // [i][j] is 1 if CUDA's GPU i can access the memory of GPU j
};

// A library: returns the address of a function of it, nullptr if there is none.
using Symbols = std::function<void*(const char* function)>;

// `nvml` and `cuda` are empty if the library cannot be opened, for the reason in the error text.
DriverFacts query_driver(const Symbols& nvml, const std::string& nvml_error, const Symbols& cuda,
                         const std::string& cuda_error);

// Asks this machine's libraries, each in a child process of at most `seconds`. If the process crashes or
// hangs, the error of its library says so.
DriverFacts query_driver(double seconds);

// The GPU on which a process computes: CUDA's device 0, after CUDA_VISIBLE_DEVICES.
struct CudaDevice {
  std::string name;    // "NVIDIA H100 80GB HBM3"
  std::string driver;  // of the kernel driver and of libcuda.so.1: "580.65.06, CUDA 13000"
};
// Asks libcuda.so.1 in this process, without making a context. nullopt if there is no driver or no GPU.
// `root`: another root folder for /sys, for tests.
std::optional<CudaDevice> first_cuda_device(const std::filesystem::path& root = "/");

// For passing them from the child, and for `bough doctor --json`.
void to_json(Json& json, const DriverFacts& facts);
void from_json(const Json& json, DriverFacts& facts);

}  // namespace bough
