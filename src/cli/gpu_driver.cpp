#include "cli/gpu_driver.h"

#include <dlfcn.h>

#include <array>
#include <fstream>
#include <utility>

#include "base/child_process.h"
#include "base/error.h"

namespace bough {

namespace {

// Declarations of nvml.h and cuda.h, as far as they are used. NVML's functions return 0 if they succeed.
using NvmlDevice = void*;
struct NvmlMemory {
  unsigned long long total, free, used;
};
struct NvmlProcess {  // nvmlProcessInfo_v2_t, which nvmlDeviceGetComputeRunningProcesses_v3 fills
  unsigned pid;
  unsigned long long used;  // all ones: unknown
  unsigned gpu_instance, compute_instance;
};
constexpr int kNvmlInsufficientSize = 7;
constexpr unsigned kUncorrected = 1, kVolatile = 0;  // ECC errors since the driver was loaded
constexpr unsigned kMaxNvlinks = 36;
constexpr int kCudaMajor = 75, kCudaMinor = 76;  // CUdevice_attribute

// Calls a function of a library. Returns -1 if the library has no such function.
template <class... Args>
int call(const Symbols& library, const char* function, Args... args) {
  auto* const pointer = reinterpret_cast<int (*)(Args...)>(library(function));
  return pointer ? pointer(args...) : -1;
}

std::string nvml_message(const Symbols& nvml, const char* function, int code) {
  auto* const text = reinterpret_cast<const char* (*)(int)>(nvml("nvmlErrorString"));
  const char* const message = text && code >= 0 ? text(code) : nullptr;
  return str(function, code < 0 ? " is missing" : str(": error ", code),
             message ? str(" (", message, ")") : "");
}

void read_processes(const Symbols& nvml, NvmlDevice device, Gpu& gpu) {
  std::vector<NvmlProcess> found(64);
  for (int attempt = 0; attempt < 4; ++attempt) {  // the number may grow between two calls
    auto count = static_cast<unsigned>(found.size());
    const int code = call(nvml, "nvmlDeviceGetComputeRunningProcesses_v3", device, &count, found.data());
    if (code == kNvmlInsufficientSize) {
      found.resize(found.size() * 4);
      continue;
    }
    if (code != 0 || count > found.size()) return;
    gpu.lists_processes = true;
    for (unsigned i = 0; i < count; ++i)
      gpu.processes.push_back(
          {found[i].pid, found[i].used == ~0ULL ? -1 : static_cast<int64_t>(found[i].used)});
    return;
  }
}

Gpu read_gpu(const Symbols& nvml, unsigned index) {
  Gpu gpu;
  NvmlDevice device = nullptr;
  if (const int code = call(nvml, "nvmlDeviceGetHandleByIndex_v2", index, &device)) {
    gpu.error = nvml_message(nvml, "nvmlDeviceGetHandleByIndex_v2", code);
    return gpu;
  }
  std::array<char, 96> name{};
  if (call(nvml, "nvmlDeviceGetName", device, name.data(), static_cast<unsigned>(name.size() - 1)) == 0)
    gpu.name = name.data();
  int major = 0, minor = 0;
  if (call(nvml, "nvmlDeviceGetCudaComputeCapability", device, &major, &minor) == 0)
    gpu.major = major, gpu.minor = minor;
  NvmlMemory memory{};
  if (call(nvml, "nvmlDeviceGetMemoryInfo", device, &memory) == 0)
    gpu.total = static_cast<int64_t>(memory.total), gpu.free = static_cast<int64_t>(memory.free);
  read_processes(nvml, device, gpu);
  const auto read_int = [&](const char* function, int& value) {
    int found = 0;
    if (call(nvml, function, device, &found) == 0) value = found;
  };
  read_int("nvmlDeviceGetPersistenceMode", gpu.persistence_mode);
  read_int("nvmlDeviceGetComputeMode", gpu.compute_mode);
  unsigned current = 0, pending = 0, corrected = 0, uncorrected = 0, failed = 0;
  if (call(nvml, "nvmlDeviceGetMigMode", device, &current, &pending) == 0)
    gpu.mig_mode = static_cast<int>(current);
  unsigned long long errors = 0;
  if (call(nvml, "nvmlDeviceGetTotalEccErrors", device, kUncorrected, kVolatile, &errors) == 0)
    gpu.uncorrected_errors = static_cast<int64_t>(errors);
  if (call(nvml, "nvmlDeviceGetRemappedRows", device, &corrected, &uncorrected, &pending, &failed) == 0)
    gpu.rows_pending = pending != 0 || failed != 0;
  for (unsigned link = 0; link < kMaxNvlinks; ++link) {
    int active = 0;
    if (call(nvml, "nvmlDeviceGetNvLinkState", device, link, &active) != 0) break;
    gpu.nvlinks += active == 1;
  }
  return gpu;
}

void query_nvml(const Symbols& nvml, DriverFacts& facts) {
  if (const int code = call(nvml, "nvmlInit_v2")) {
    facts.nvml_error = nvml_message(nvml, "nvmlInit_v2", code);
    return;
  }
  std::array<char, 96> version{};
  if (call(nvml, "nvmlSystemGetDriverVersion", version.data(), static_cast<unsigned>(version.size() - 1)) ==
      0)
    facts.version = version.data();
  unsigned count = 0;
  if (const int code = call(nvml, "nvmlDeviceGetCount_v2", &count))
    facts.nvml_error = nvml_message(nvml, "nvmlDeviceGetCount_v2", code);
  else
    for (unsigned i = 0; i < count; ++i) facts.gpus.push_back(read_gpu(nvml, i));
  call(nvml, "nvmlShutdown");
}

// CUDA's own list, for drivers without NVML.
Gpu read_cuda_gpu(const Symbols& cuda, int device) {
  Gpu gpu;
  std::array<char, 256> name{};
  if (call(cuda, "cuDeviceGetName", name.data(), static_cast<int>(name.size() - 1), device) == 0)
    gpu.name = name.data();
  int major = 0, minor = 0;
  if (call(cuda, "cuDeviceGetAttribute", &major, kCudaMajor, device) == 0 &&
      call(cuda, "cuDeviceGetAttribute", &minor, kCudaMinor, device) == 0)
    gpu.major = major, gpu.minor = minor;
  size_t total = 0;
  if (call(cuda, "cuDeviceTotalMem_v2", &total, device) == 0) gpu.total = static_cast<int64_t>(total);
  return gpu;
}

void query_cuda(const Symbols& cuda, DriverFacts& facts) {
  call(cuda, "cuDriverGetVersion", &facts.cuda_version);
  const auto failed = [&](const char* function, int code) {
    const char* message = nullptr;
    if (code > 0) call(cuda, "cuGetErrorString", code, &message);
    facts.cuda_code = code;
    facts.cuda_error = str(function, code < 0 ? " is missing" : str(": error ", code),
                           message ? str(" (", message, ")") : "");
  };
  if (const int code = call(cuda, "cuInit", 0u)) return failed("cuInit", code);
  int count = 0;
  if (const int code = call(cuda, "cuDeviceGetCount", &count)) return failed("cuDeviceGetCount", code);
  facts.cuda_gpus = count;
  std::vector<int> devices(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) call(cuda, "cuDeviceGet", &devices[static_cast<size_t>(i)], i);
  for (const int device : devices) {
    if (!facts.nvml_error.empty()) facts.gpus.push_back(read_cuda_gpu(cuda, device));
    std::vector<int>& row = facts.peers.emplace_back();
    for (const int peer : devices) {
      int can = device == peer;
      if (device != peer) call(cuda, "cuDeviceCanAccessPeer", &can, device, peer);
      row.push_back(can);
    }
  }
}

// The reason goes to `error`.
Symbols open_symbols(const char* name, std::string& error) {
  void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library) return [library](const char* function) { return dlsym(library, function); };
  const char* const reason = dlerror();
  error = reason ? reason : str("cannot open ", name);
  return {};
}

}  // namespace

DriverFacts query_driver(const Symbols& nvml, const std::string& nvml_error, const Symbols& cuda,
                         const std::string& cuda_error) {
  DriverFacts facts;
  facts.nvml_error = nvml_error;
  facts.cuda_error = cuda_error;
  if (nvml) query_nvml(nvml, facts);
  if (cuda) query_cuda(cuda, facts);
  else facts.cuda_code = kNoCudaLibrary;
  return facts;
}

DriverFacts query_driver(double seconds) {
  // Two processes: what NVML says helps if CUDA does not answer.
  const ChildResult by_nvml = run_in_child(
      [] {
        std::string error;
        const Symbols nvml = open_symbols("libnvidia-ml.so.1", error);
        return dump_line(query_driver(nvml, error, {}, ""));
      },
      seconds);
  DriverFacts facts;
  if (by_nvml.is_done) facts = parse_json(by_nvml.output, "NVML's answers").get<DriverFacts>();
  else facts.nvml_error = str("the process that asks NVML ", by_nvml.failure);

  const ChildResult by_cuda = run_in_child(
      [&facts] {
        std::string error;
        const Symbols cuda = open_symbols("libcuda.so.1", error);
        return dump_line(query_driver({}, facts.nvml_error, cuda, error));
      },
      seconds);
  if (!by_cuda.is_done) {
    facts.cuda_error = str("the process that asks CUDA ", by_cuda.failure);
    facts.cuda_code = kDriverQueryFailed;
    return facts;
  }
  DriverFacts cuda = parse_json(by_cuda.output, "CUDA's answers").get<DriverFacts>();
  cuda.version = facts.version;
  if (facts.nvml_error.empty()) cuda.gpus = std::move(facts.gpus);
  return cuda;
}

std::optional<CudaDevice> first_cuda_device(const std::filesystem::path& root) {
  std::string error;
  const Symbols cuda = open_symbols("libcuda.so.1", error);
  int count = 0, device = 0, version = 0;
  std::array<char, 256> name{};
  if (!cuda || call(cuda, "cuInit", 0u) != 0 || call(cuda, "cuDeviceGetCount", &count) != 0 || count == 0 ||
      call(cuda, "cuDeviceGet", &device, 0) != 0 ||
      call(cuda, "cuDeviceGetName", name.data(), static_cast<int>(name.size() - 1), device) != 0)
    return {};
  call(cuda, "cuDriverGetVersion", &version);
  std::ifstream file(root / "sys/module/nvidia/version");
  std::string driver;
  file >> driver;
  return CudaDevice{name.data(), str(driver.empty() ? "" : driver + ", ", "CUDA ", version)};
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GpuProcess, pid, bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Gpu, name, error, major, minor, total, free, lists_processes, processes,
                                   persistence_mode, mig_mode, compute_mode, uncorrected_errors, rows_pending,
                                   nvlinks)

void to_json(Json& json, const DriverFacts& facts) {
  json = {
      {"nvml_error", facts.nvml_error}, {"version", facts.version},     {"gpus", facts.gpus},
      {"cuda_error", facts.cuda_error}, {"cuda_code", facts.cuda_code}, {"cuda_version", facts.cuda_version},
      {"cuda_gpus", facts.cuda_gpus},   {"peers", facts.peers}};
}

void from_json(const Json& json, DriverFacts& facts) {
  json.at("nvml_error").get_to(facts.nvml_error);
  json.at("version").get_to(facts.version);
  json.at("gpus").get_to(facts.gpus);
  json.at("cuda_error").get_to(facts.cuda_error);
  json.at("cuda_code").get_to(facts.cuda_code);
  json.at("cuda_version").get_to(facts.cuda_version);
  json.at("cuda_gpus").get_to(facts.cuda_gpus);
  json.at("peers").get_to(facts.peers);
}

}  // namespace bough
