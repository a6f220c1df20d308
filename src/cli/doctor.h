// The checks of `bough doctor`: facts about this build and this machine, and the findings that follow from
// them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/memory.h"
#include "cli/gpu_driver.h"
#include "cli/self_tests.h"

namespace bough {

enum class FindingState {
  kOk,
  kWarning,    // runs work, but slower or without a feature
  kMissing,    // a run on the CPU or on this machine's GPUs fails without it
  kNotNeeded,  // nothing on this machine uses it
};
const char* name_of(FindingState state);  // "ok", "warning", "missing", "not needed"

struct Finding {
  std::string what;   // "driver", "gpu 0: memory"
  std::string found;  // "580.65.06, CUDA 13.0"
  FindingState state = FindingState::kOk;
  std::string remedy;  // one sentence; "" if there is nothing to do
};

struct TorchVersion {
  std::string torch;  // "2.11.0+cu130"; "" if the file does not say
  std::string cuda;   // "13.0"; "" if this torch is a CPU build
};
// `text`: the content of torch/version.py.
TorchVersion parse_torch_version(const std::string& text);
TorchVersion read_torch_version();  // of the torch that this process has loaded

struct BuildFacts {
  std::string version;                                         // of Bough
  std::vector<std::pair<std::string, std::string>> build_ids;  // file of the program or a library, its id
  std::filesystem::path torch_folder;                          // of libtorch_cpu.so's wheel
  TorchVersion torch;
  std::string cuda_architectures;      // that the CUDA library is compiled for, such as "80 90a-real"
  std::filesystem::path cuda_library;  // empty: not installed
  bool cuda_library_opens = false;
  std::string cuda_error;              // why the library does not open, or why libtorch then finds no GPU
  std::filesystem::path nccl_library;  // libbough_nccl.so; empty: not installed
  std::string nccl_library_error;
  int nccl_version = 0;  // of NCCL itself, such as 22703; 0: unknown
};

struct DiskFacts {
  std::string what;  // "disk: cache"
  std::string path;  // "" if no variable names a folder
  int64_t free = 0;
  bool is_writable = false;
};

// The self-test of the kernels on the GPU that a run would use.
struct SelfTestFacts {
  std::optional<SelfTestKey> key;  // nullopt: there is no GPU, or no libbough_cuda.so
  std::filesystem::path file;      // where the result is cached
  std::optional<SelfTestResult> result;
  int64_t age = 0;  // of the result, in seconds
};

// A limit of -1 is unlimited.
struct HostFacts {
  std::string cpu;            // "Intel(R) Xeon(R) Processor, 2 cores, avx2 avx512"
  std::string kernels;        // the instruction sets that Bough's kernels use: "avx512"
  std::string kernels_error;  // a wrong value of BOUGH_MAX_ISA
  std::string narrowed;       // what the CPU has and the kernels do not use
  HostMemory memory;
  int64_t locked_memory = -1, open_files = -1, address_space = -1;  // ulimit -l (bytes), -n, -v (bytes)
  int64_t shm_total = -1, shm_free = -1;                            // bytes of /dev/shm; -1: there is none
  bool has_infiniband = false;
  int pci_gpus = 0;               // NVIDIA GPUs on the PCI bus, with or without a driver
  bool has_driver_files = false;  // /dev/nvidiactl: the kernel driver is loaded and this container may use it
  bool is_container = false;
  bool has_visible_devices = false;
  std::string visible_devices;  // CUDA_VISIBLE_DEVICES
  std::string python, python_version, python_error;
  std::string sandbox_error;  // "" if bubblewrap makes sandboxes
  bool has_mpirun = false, has_mpi_library = false;
  std::string zstd_version;
  std::vector<DiskFacts> disks;
};

// How a GPU executes a library compiled for `architectures`, as CMake writes them: "80 90a-real".
enum class CodeFor { kMachineCode, kPtx, kNone };
CodeFor code_for(const std::string& architectures, int major, int minor);

// The oldest driver branch for a CUDA version such as "13.0", such as 580; 0 if unknown.
int least_driver(const std::string& cuda);

// Whether the machine has a GPU, or a driver that does not work. Without either, nothing of a GPU is needed.
bool has_gpu(const DriverFacts& driver, const HostFacts& host);

std::vector<Finding> check_build(const BuildFacts& build, bool has_gpu);
std::vector<Finding> check_driver(const DriverFacts& driver, const BuildFacts& build, const HostFacts& host);
std::vector<Finding> check_gpus(const DriverFacts& driver, const BuildFacts& build);
std::vector<Finding> check_cuda_libraries(const BuildFacts& build, const DriverFacts& driver, bool has_gpu);
std::vector<Finding> check_self_test(const SelfTestFacts& facts);
std::vector<Finding> check_host(const HostFacts& host, int gpus);

// Reads the machine. `root`: another root folder for /dev, /proc and /sys, for tests.
HostFacts read_host(const std::string& fileroot, const std::filesystem::path& root = "/");

// Reads the build, and opens the CUDA and NCCL libraries in a child process of at most `seconds`, unless
// `opens` is false.
BuildFacts read_build(bool opens, double seconds);

// Finds the GPU in a child process of at most `seconds`, and reads the cached result of its self-test.
SelfTestFacts read_self_test_facts(double seconds);

}  // namespace bough
