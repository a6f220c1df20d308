#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <zstd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "base/build_id.h"
#include "base/child_process.h"
#include "base/cpu.h"
#include "base/error.h"
#include "base/file.h"
#include "base/run_time_library.h"
#include "cli/command.h"
#include "cli/doctor.h"
#include "cli/launcher.h"
#include "comm/communicator.h"
#include "env/process_reward.h"
#include "env/sandbox.h"
#include "kernels/common/cuda_library.h"
#include "kernels/common/isa.h"

namespace bough {

namespace fs = std::filesystem;

namespace {

constexpr double kToolSeconds = 20;

std::string read_word(const fs::path& path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

bool has_file(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

int count_pci_gpus(const fs::path& root) {
  int count = 0;
  std::error_code error;
  for (fs::directory_iterator device(root / "sys/bus/pci/devices", error), end; !error && device != end;
       device.increment(error))
    // Class 0x03: display controllers, which includes GPUs without a display.
    count += read_word(device->path() / "vendor") == "0x10de" &&
             read_word(device->path() / "class").starts_with("0x03");
  return count;
}

void read_cpu(const fs::path& root, HostFacts& host) {
  const CpuFeatures has = cpu_features();
  const std::string model = cpu_model(root);
  host.cpu = str(model.empty() ? "CPU of unknown model" : model, ", ", std::thread::hardware_concurrency(),
                 " cores, ", describe(has));
  try {
    CpuFeatures used, left;
    used.avx2 = best_isa() >= Isa::kAvx2;
    used.avx512 = best_isa() >= Isa::kAvx512;
    used.avx512_bf16 = has_avx512_bf16();
    used.amx_bf16 = has_amx();
    host.kernels = describe(used);
    left.avx2 = has.avx2 && !used.avx2;
    left.avx512 = has.avx512 && !used.avx512;
    left.avx512_bf16 = has.avx512_bf16 && !used.avx512_bf16;
    left.amx_bf16 = has.amx_bf16 && !used.amx_bf16;
    if (left.avx2 || left.avx512 || left.avx512_bf16 || left.amx_bf16) host.narrowed = describe(left);
  } catch (const UserError& error) {
    host.kernels_error = error.what();
  }
}

int64_t soft_limit(__rlimit_resource_t resource) {
  struct rlimit limit = {};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return -1;
  return static_cast<int64_t>(limit.rlim_cur);
}

// Describes the folder, or the nearest folder above it that exists.
DiskFacts read_disk(const std::string& what, const fs::path& path) {
  DiskFacts disk{.what = what};
  std::error_code error;
  if (path.empty()) return disk;
  disk.path = fs::absolute(path, error).string();
  fs::path folder = disk.path;
  while (!has_file(folder) && folder != folder.parent_path()) folder = folder.parent_path();
  struct statvfs found = {};
  if (::statvfs(folder.c_str(), &found) == 0)
    disk.free = static_cast<int64_t>(found.f_bavail) * static_cast<int64_t>(found.f_frsize);
  disk.is_writable = fs::is_directory(folder, error) && ::access(folder.c_str(), W_OK) == 0;
  return disk;
}

// Asks in a child process: a network drive may hang.
DiskFacts read_disk_in_child(const std::string& what, const fs::path& path) {
  const ChildResult result = run_in_child(
      [&] {
        const DiskFacts disk = read_disk(what, path);
        return dump_line({{"path", disk.path}, {"free", disk.free}, {"is_writable", disk.is_writable}});
      },
      kToolSeconds);
  if (!result.is_done) return {what, str(path.string(), " (", result.failure, ")")};
  const Json disk = parse_json(result.output, what);
  return {what, disk.at("path").get<std::string>(), disk.at("free").get<int64_t>(),
          disk.at("is_writable").get<bool>()};
}

// Starts Python in a child process: it may lie on a network drive that hangs.
void read_python(HostFacts& host) {
  const ChildResult result = run_in_child(
      [] {
        const std::string python = find_python("");
        std::string quoted_path = "'";
        for (const char c : python) quoted_path += c == '\'' ? "'\\''" : std::string(1, c);
        FILE* const pipe =
            ::popen((quoted_path + "' -c 'import platform; print(platform.python_version())'").c_str(), "r");
        if (!pipe) throw IoError(str(python, " cannot be started"));
        char version[64] = {};
        const bool has_line = std::fgets(version, sizeof version, pipe) != nullptr;
        if (::pclose(pipe) != 0 || !has_line) throw IoError(str(python, " does not run"));
        std::string text = version;
        while (!text.empty() && text.back() == '\n') text.pop_back();
        return str(text, "\n", python);
      },
      kToolSeconds);
  host.python_error = result.failure;
  const size_t end = result.output.find('\n');
  if (end == std::string::npos) return;
  host.python_version = result.output.substr(0, end);
  host.python = result.output.substr(end + 1);
}

// The file of libtorch_cpu.so is torch/lib/libtorch_cpu.so.
fs::path find_torch_folder() {
  Dl_info info = {};
  if (dladdr(reinterpret_cast<void*>(&at::get_num_threads), &info) == 0 || !info.dli_fname) return {};
  std::error_code error;
  const fs::path file = fs::canonical(info.dli_fname, error);
  return file.parent_path().parent_path();
}

// Runs in the child process that opens the CUDA libraries, and returns its report.
Json open_libraries(const fs::path& nccl_library) {
  Json found = {{"opens", false}, {"error", ""}, {"nccl_error", ""}, {"nccl_version", 0}};
  try {
    open_cuda_library();
  } catch (const std::exception& error) {
    found["error"] = error.what();
  }
  found["opens"] = cuda_library_is_open();
  int version = 0;
  auto* const nccl = reinterpret_cast<int (*)(int*)>(dlsym(RTLD_DEFAULT, "ncclGetVersion"));
  if (nccl && nccl(&version) == 0) found["nccl_version"] = version;
  if (!nccl_library.empty() && !dlopen(nccl_library.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
    const char* const reason = dlerror();
    found["nccl_error"] = reason ? reason : "cannot be opened";
  }
  return found;
}

// The texts of the program's messages begin with the setting, which is not known here.
std::string without_prefix(std::string text) {
  constexpr std::string_view kPrefix = "device cuda: ";
  if (text.starts_with(kPrefix)) text.erase(0, kPrefix.size());
  return text;
}

// The program's build id and those of its libraries. No ids where the build has none.
std::vector<std::pair<std::string, std::string>> read_build_ids(const fs::path& cuda_library) {
  std::vector<std::pair<std::string, std::string>> ids;
  ids = {{"program", build_id()}, {"libbough_kernels.so", kernels_build_id()}};
  std::vector<fs::path> files{cuda_library, find_run_time_library("libbough_nccl.so"),
                              find_run_time_library("libbough_mpi.so")};
  for (const fs::path& file : files)
    if (!file.empty()) ids.emplace_back(file.filename().string(), build_id_of(file));
  return ids;
}

}  // namespace

HostFacts read_host(const std::string& fileroot, const fs::path& root) {
  HostFacts host;
  read_cpu(root, host);
  host.memory = host_memory(root);
  host.locked_memory = soft_limit(RLIMIT_MEMLOCK);
  host.open_files = soft_limit(RLIMIT_NOFILE);
  host.address_space = soft_limit(RLIMIT_AS);
  struct statvfs shm = {};
  if (::statvfs((root / "dev/shm").c_str(), &shm) == 0) {
    host.shm_total = static_cast<int64_t>(shm.f_blocks) * static_cast<int64_t>(shm.f_frsize);
    host.shm_free = static_cast<int64_t>(shm.f_bavail) * static_cast<int64_t>(shm.f_frsize);
  }
  std::error_code error;
  host.has_infiniband =
      fs::directory_iterator(root / "sys/class/infiniband", error) != fs::directory_iterator();
  host.pci_gpus = count_pci_gpus(root);
  host.has_driver_files = has_file(root / "dev/nvidiactl");
  host.is_container = has_file(root / ".dockerenv") || has_file(root / "run/.containerenv") ||
                      std::getenv("KUBERNETES_SERVICE_HOST") || std::getenv("container");
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  host.has_visible_devices = visible != nullptr;
  host.visible_devices = visible ? visible : "";
  read_python(host);
  const ChildResult sandbox = run_in_child(
      [] { return Sandbox(SandboxSettings{.allow_unsandboxed = true}).why_not(); }, 2 * kToolSeconds);
  host.sandbox_error = sandbox.is_done ? sandbox.output : sandbox.failure;
  host.has_mpirun = is_on_path("mpirun");
  host.has_mpi_library = has_mpi_library();
  host.zstd_version = ZSTD_versionString();
  host.disks = {read_disk_in_child("disk: fileroot", fileroot),
                read_disk_in_child("disk: cache", cache_folder())};
  return host;
}

TorchVersion read_torch_version() {
  std::error_code error;
  const fs::path file = find_torch_folder() / "version.py";
  return fs::is_regular_file(file, error) ? parse_torch_version(read_file(file)) : TorchVersion();
}

BuildFacts read_build(bool opens, double seconds) {
  BuildFacts build;
  build.version = program_version();
  build.torch_folder = find_torch_folder();
  build.torch = read_torch_version();
  build.cuda_architectures = BOUGH_CUDA_ARCHITECTURES;
  build.cuda_library = find_cuda_library();
  build.build_ids = read_build_ids(build.cuda_library);
  if (build.cuda_library.empty()) return build;
  if (const fs::path nccl = build.cuda_library.parent_path() / "libbough_nccl.so"; has_file(nccl))
    build.nccl_library = nccl;
  if (!opens) {
    build.cuda_error = build.nccl_library_error = "not opened, because the driver does not answer";
    return build;
  }
  const ChildResult result =
      run_in_child([&] { return dump_line(open_libraries(build.nccl_library)); }, seconds);
  if (!result.is_done) {
    build.cuda_error = build.nccl_library_error = str("the process that opens it ", result.failure);
    return build;
  }
  const Json found = parse_json(result.output, "the opened libraries");
  build.cuda_library_opens = found.at("opens").get<bool>();
  build.cuda_error = without_prefix(found.at("error").get<std::string>());
  if (!build.cuda_error.empty() && !result.errors.empty())  // libtorch's warnings name the cause
    build.cuda_error += str("; libtorch: ", quoted(result.errors, 600));
  build.nccl_version = found.at("nccl_version").get<int>();
  build.nccl_library_error = found.at("nccl_error").get<std::string>();
  return build;
}

}  // namespace bough
