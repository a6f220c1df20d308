#include <algorithm>
#include <charconv>
#include <sstream>

#include "base/error.h"
#include "base/format.h"
#include "cli/doctor.h"

namespace bough {

namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;
using enum FindingState;

// Values of CUresult.
constexpr int kStubLibrary = 34, kNoDevice = 100, kInvalidDevice = 101, kSystemNotReady = 802,
              kDriverMismatch = 803, kNoCompatibility = 804;

// The command that installs the torch that this process runs beside.
std::string pip_install(const TorchVersion& found) {
  const std::string version = found.torch.substr(0, found.torch.find('+'));
  return version.empty() ? "pip install torch" : "pip install torch==" + version;
}

std::string bytes_or_unlimited(int64_t bytes) {
  return bytes < 0 ? "unlimited" : format_bytes(static_cast<double>(bytes));
}

// "580.65.06" -> 580, "13.0" -> 13; 0 if the text does not begin with a number.
int leading_number(const std::string& text) {
  int value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

// NCCL's and CUDA's versions are one number: 22703 is 2.27.3, 13000 is 13.0.
std::string nccl_version_text(int version) {
  return str(version / 10000, ".", version / 100 % 100, ".", version % 100);
}
std::string cuda_version_text(int version) {
  return str(version / 1000, ".", version % 1000 / 10);
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

// The remedy for a CUresult of cuInit. The texts of CUDA itself name no remedy.
std::string cuda_remedy(int code, const DriverFacts& driver, const HostFacts& host) {
  const std::string devices =
      str("CUDA_VISIBLE_DEVICES is ", quoted(host.visible_devices), ": unset it, or name GPUs that exist");
  switch (code) {
    case kDriverQueryFailed:
      return "look for Xid lines in `dmesg`, reset the GPU (nvidia-smi --gpu-reset) or restart the machine";
    case kNoCudaLibrary:
      return host.is_container ? "start the container with its GPUs, such as docker run --gpus all (needs "
                                 "nvidia-container-toolkit on the host)"
                               : "install the NVIDIA driver, version 580 or newer";
    case kNoDevice:
      return host.has_visible_devices
                 ? devices
                 : "check that nvidia-smi lists the GPU, and in a container that /dev/nvidia0 exists";
    case kStubLibrary:
      return "libcuda.so.1 is a stub to link against: take folders named stubs out of LD_LIBRARY_PATH";
    case kInvalidDevice: return devices;
    case kSystemNotReady:
      return "start the fabric manager of this driver's version (systemctl start nvidia-fabricmanager)";
    case kDriverMismatch:
      return "restart the machine: the loaded kernel driver and the installed libraries differ";
    case kNoCompatibility:
      return "this GPU takes no compatibility package: install driver 580 or newer and take the package's "
             "folder out of LD_LIBRARY_PATH";
    default:
      return str("look for Xid and NVRM lines in `dmesg`; restart the machine, or install driver ",
                 std::max(580, leading_number(driver.version)), " again");
  }
}

Finding check_version(const DriverFacts& driver, const BuildFacts& build) {
  const std::string shown =
      str(driver.version.empty() ? "version unknown" : driver.version,
          driver.cuda_version ? str(", CUDA ", cuda_version_text(driver.cuda_version)) : "");
  if (driver.version.empty() && driver.cuda_version == 0)
    return {"driver", shown, kWarning, "look at the next lines, and at the output of nvidia-smi"};
  const int least = least_driver(build.torch.cuda);
  if (least == 0) return {"driver", shown, kOk, ""};
  const int major = leading_number(build.torch.cuda);
  // A compatibility package brings a newer libcuda.so.1 for an older kernel driver.
  const bool by_cuda = driver.cuda_version / 1000 >= major;
  const bool by_driver = leading_number(driver.version) >= least;
  if (driver.cuda_version > 0 ? by_cuda : by_driver)
    return {"driver", str(shown, by_driver || driver.version.empty() ? "" : " (compatibility package)"), kOk,
            ""};
  if (by_driver)
    return {"driver", shown, kMissing,
            "the driver is new enough, but libcuda.so.1 is older: take folders of older compatibility "
            "packages (/usr/local/cuda*/compat) out of LD_LIBRARY_PATH"};
  return {"driver", shown, kMissing,
          str("torch of CUDA ", build.torch.cuda, " needs driver ", least,
              " or newer: install it, or on a data centre GPU the package cuda-compat-", major,
              "-0 with "
              "/usr/local/cuda-",
              major, ".0/compat first in LD_LIBRARY_PATH")};
}

std::string describe_processes(const Gpu& gpu) {
  if (!gpu.lists_processes) return ", processes unknown";
  std::string text;
  for (const GpuProcess& process : gpu.processes)
    text += str(text.empty() ? ", used by pid " : ", pid ", process.pid,
                process.bytes < 0 ? "" : str(" (", format_bytes(static_cast<double>(process.bytes)), ")"));
  return text;
}

Finding check_memory(const std::string& name, const Gpu& gpu) {
  if (gpu.total < 0) return {name, "unknown", kWarning, "check the GPU with nvidia-smi"};
  if (gpu.free < 0)
    return {name, str(format_bytes(static_cast<double>(gpu.total)), ", free memory unknown without NVML"),
            kOk, ""};
  const auto total = static_cast<double>(gpu.total), free = static_cast<double>(gpu.free);
  const std::string shown =
      str(format_bytes(free), " free of ", format_bytes(total), describe_processes(gpu));
  // The driver itself takes less.
  if (total - free < 0.02 * total + kGiB && gpu.processes.empty()) return {name, shown, kOk, ""};
  return {name, shown, kWarning,
          gpu.processes.empty()
              ? "other containers or users may hold the memory: look with nvidia-smi on the host, or choose "
                "another GPU by CUDA_VISIBLE_DEVICES"
              : "a run plans with the free memory only: end these processes (pids as on the host), or choose "
                "another GPU by CUDA_VISIBLE_DEVICES"};
}

Finding check_capability(const std::string& name, const Gpu& gpu, const std::string& architectures) {
  if (gpu.major < 0)
    return {name, str(gpu.name, ", compute capability unknown"), kWarning, "check the GPU with nvidia-smi"};
  const std::string shown = str(gpu.name, ", compute capability ", gpu.major, ".", gpu.minor);
  if (gpu.major < 8)
    return {name, shown, kMissing, "use a GPU of compute capability 8.0 (A100) or newer, or device cpu"};
  if (architectures.empty()) return {name, shown, kOk, ""};  // there is no CUDA library: another row
  switch (code_for(architectures, gpu.major, gpu.minor)) {
    case CodeFor::kMachineCode: return {name, str(shown, ", kernels compiled for it"), kOk, ""};
    case CodeFor::kPtx:
      return {
          name, str(shown, ", kernels compiled from PTX by the driver"), kWarning,
          "the first start takes minutes (cached in ~/.nv), and the kernels were never tuned for this GPU"};
    case CodeFor::kNone: break;
  }
  return {name, str(shown, ", kernels compiled for ", architectures), kMissing,
          str("build Bough with CMAKE_CUDA_ARCHITECTURES set to ", gpu.major, gpu.minor)};
}

std::vector<Finding> check_gpu(const std::string& name, const Gpu& gpu, const std::string& architectures) {
  if (!gpu.error.empty())
    return {{name, gpu.error, kMissing,
             "the GPU does not answer: look for Xid lines in `dmesg`, or reset it (nvidia-smi "
             "--gpu-reset)"}};
  std::vector<Finding> rows{check_capability(name, gpu, architectures), check_memory(name + ": memory", gpu)};
  if (gpu.compute_mode == 2)
    rows.push_back({name + ": compute mode", "prohibited", kMissing, "allow it: nvidia-smi -c DEFAULT"});
  if (gpu.compute_mode == 3)
    rows.push_back({name + ": compute mode", "exclusive process", kWarning,
                    "only one process may use this GPU: nvidia-smi -c DEFAULT allows several"});
  if (gpu.mig_mode == 1)
    rows.push_back(
        {name + ": MIG", "on", kWarning,
         "a run sees one instance with a part of the memory: choose it by CUDA_VISIBLE_DEVICES, or "
         "switch MIG off (nvidia-smi -mig 0)"});
  if (gpu.persistence_mode == 0)
    rows.push_back({name + ": persistence mode", "off", kWarning,
                    "each start takes seconds longer: nvidia-smi -pm 1 (as root on the host)"});
  if (gpu.uncorrected_errors > 0 || gpu.rows_pending == 1)
    rows.push_back(
        {name + ": ECC",
         str(std::max<int64_t>(0, gpu.uncorrected_errors), " uncorrected errors",
             gpu.rows_pending == 1 ? ", memory rows wait for replacement" : ""),
         kWarning,
         "results may be wrong or runs end by Xid errors: reset the GPU (nvidia-smi --gpu-reset), and "
         "have it replaced if the errors come back"});
  return rows;
}

Finding check_links(const DriverFacts& driver) {
  size_t pairs = 0, accessible = 0;
  for (size_t i = 0; i < driver.peers.size(); ++i)
    for (size_t j = 0; j < driver.peers[i].size(); ++j)
      if (i != j) ++pairs, accessible += driver.peers[i][j] == 1;
  const auto linked =
      std::count_if(driver.gpus.begin(), driver.gpus.end(), [](const Gpu& gpu) { return gpu.nvlinks > 0; });
  const std::string shown = str(linked, " of ", driver.gpus.size(), " GPUs with NVLink, peer access in ",
                                accessible, " of ", pairs, " pairs");
  if (accessible == pairs) return {"gpu links", shown, kOk, ""};
  return {"gpu links", shown, kWarning,
          "collectives between some GPUs go through host memory and are slower: look at nvidia-smi topo -m"};
}

Finding check_disk(const DiskFacts& disk) {
  const bool is_cache = disk.what == "disk: cache";
  if (disk.path.empty())
    return {disk.what, "no folder", kWarning,
            "set HOME or BOUGH_CACHE, or every run measures its device again"};
  const std::string shown = str(format_bytes(static_cast<double>(disk.free)), " free, ", disk.path);
  if (!disk.is_writable)
    return {disk.what, shown + ", not writable", is_cache ? kWarning : kMissing,
            is_cache
                ? "set BOUGH_CACHE to a folder that can be written, or every run measures its device again"
                : "change to a folder that can be written, or set fileroot"};
  const double least = is_cache ? kGiB / 16 : 10 * kGiB;
  if (static_cast<double>(disk.free) >= least) return {disk.what, shown, kOk, ""};
  return {disk.what, shown, kWarning,
          is_cache
              ? "free some space, or set BOUGH_CACHE to another folder"
              : "checkpoints of an 8B model take over 100 GiB each with their optimizer: free some space, "
                "or set fileroot to another folder"};
}

bool is_at_least_3_10(const std::string& version) {
  const size_t dot = version.find('.');
  const int major = leading_number(version);
  return major > 3 ||
         (major == 3 && dot != std::string::npos && leading_number(version.substr(dot + 1)) >= 10);
}

std::vector<Finding> check_tools(const HostFacts& host) {
  std::vector<Finding> rows;
  const bool old_python = !is_at_least_3_10(host.python_version);
  rows.push_back(
      host.python_error.empty()
          ? Finding{"python3", str(host.python_version, ", ", host.python), old_python ? kWarning : kOk,
                    old_python ? "rewards and environments in Python need 3.10 or later: set "
                                 "BOUGH_PYTHON to one"
                               : ""}
          : Finding{"python3", host.python_error, kWarning,
                    "install Python 3.10 or later, or set BOUGH_PYTHON; only rewards and environments "
                    "in Python need it"});
  rows.push_back(
      host.sandbox_error.empty()
          ? Finding{"bubblewrap", "makes sandboxes", kOk, ""}
          : Finding{"bubblewrap", first_line(host.sandbox_error), kWarning,
                    "install bubblewrap 0.6 or newer and allow user namespaces (docs/verifiers.md); "
                    "only rewards that run code need it"});
  const std::string mpi = str(host.has_mpirun ? "mpirun" : "no mpirun", ", ",
                              host.has_mpi_library ? "libbough_mpi.so" : "no libbough_mpi.so");
  const bool has_mpi = host.has_mpirun && host.has_mpi_library;
  rows.push_back(
      {"MPI", mpi, has_mpi ? kOk : kNotNeeded,
       has_mpi ? "" : "--ranks starts plain processes, and torchrun starts ranks on several machines"});
  rows.push_back({"zstd", str("library ", host.zstd_version), kOk, ""});
  return rows;
}

}  // namespace

const char* name_of(FindingState state) {
  switch (state) {
    case kOk: return "ok";
    case kWarning: return "warning";
    case kMissing: return "missing";
    case kNotNeeded: break;
  }
  return "not needed";
}

TorchVersion parse_torch_version(const std::string& text) {
  TorchVersion found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t begin = line.find('\''), end = line.rfind('\'');
    if (begin == std::string::npos || end == begin) continue;
    const std::string value = line.substr(begin + 1, end - begin - 1);
    if (line.starts_with("__version__")) found.torch = value;
    if (line.starts_with("cuda:") || line.starts_with("cuda ")) found.cuda = value;
  }
  return found;
}

CodeFor code_for(const std::string& architectures, int major, int minor) {
  CodeFor best = CodeFor::kNone;
  std::istringstream words(architectures);
  for (std::string word; words >> word;) {
    const size_t dash = std::min(word.find('-'), word.size());
    const std::string kind = word.substr(dash);
    const int number = leading_number(word), its_major = number / 10, its_minor = number % 10;
    const char last = dash > 0 ? word[dash - 1] : ' ';
    const bool is_exact = last == 'a';  // code for one GPU architecture; neither newer GPUs nor PTX
    const bool runs = its_major == major && (is_exact ? its_minor == minor : its_minor <= minor);
    if (kind != "-virtual" && runs) return CodeFor::kMachineCode;
    const bool is_older = its_major < major || (its_major == major && its_minor <= minor);
    if (kind != "-real" && (is_exact ? runs : is_older)) best = CodeFor::kPtx;
  }
  return best;
}

int least_driver(const std::string& cuda) {
  switch (leading_number(cuda)) {  // CUDA Toolkit release notes, "CUDA Driver"
    case 12: return 525;
    case 13: return 580;
    default: return 0;
  }
}

bool has_gpu(const DriverFacts& driver, const HostFacts& host) {
  // A libcuda.so.1 without a GPU (an image of NVIDIA on a machine without one) or a stub to link against.
  const bool is_idle =
      driver.cuda_code == kNoCudaLibrary || driver.cuda_code == kNoDevice || driver.cuda_code == kStubLibrary;
  return !driver.gpus.empty() || driver.cuda_gpus > 0 || host.pci_gpus > 0 || host.has_driver_files ||
         (!driver.cuda_error.empty() && !is_idle);
}

std::vector<Finding> check_build(const BuildFacts& build, bool has_gpu) {
  std::string ids;
  for (const auto& [file, id] : build.build_ids) ids += str(", ", file, " ", id.empty() ? "without id" : id);
  std::vector<Finding> rows{{"bough", build.version + ids, kOk, ""}};
  for (const auto& [file, id] : build.build_ids)
    if (id != build.build_ids.front().second)
      rows.front() = {"bough", build.version + ids, kMissing,
                      "the program and its libraries are of different builds: build all targets, or install "
                      "all files of one wheel or bundle"};
  const std::string torch = str(build.torch.torch.empty() ? "version unknown" : build.torch.torch, ", ",
                                build.torch_folder.string());
  if (!build.torch.cuda.empty()) rows.push_back({"torch", str(torch, ", CUDA ", build.torch.cuda), kOk, ""});
  else
    rows.push_back({"torch", torch + ", without CUDA", has_gpu ? kMissing : kOk,
                    has_gpu ? str("install the build with CUDA 13: ", pip_install(build.torch)) : ""});
  return rows;
}

std::vector<Finding> check_driver(const DriverFacts& driver, const BuildFacts& build, const HostFacts& host) {
  if (!has_gpu(driver, host))
    return {{"driver", "no NVIDIA GPU and no driver", kNotNeeded, "runs use device cpu"}};
  std::vector<Finding> rows;
  const bool is_open = driver.cuda_code != kNoCudaLibrary && driver.cuda_code != kDriverQueryFailed;
  if (is_open || !driver.version.empty()) rows.push_back(check_version(driver, build));
  if (!driver.cuda_error.empty())
    rows.push_back({"CUDA", driver.cuda_error, kMissing, cuda_remedy(driver.cuda_code, driver, host)});
  else if (driver.cuda_gpus == 0)
    rows.push_back({"CUDA", "0 GPUs", kMissing, cuda_remedy(kNoDevice, driver, host)});
  else
    rows.push_back(
        {"CUDA",
         str(driver.cuda_gpus, driver.cuda_gpus == 1 ? " GPU" : " GPUs",
             host.has_visible_devices ? str(", CUDA_VISIBLE_DEVICES is ", quoted(host.visible_devices)) : ""),
         kOk, ""});
  if (!driver.nvml_error.empty())
    rows.push_back({"NVML", driver.nvml_error, kWarning,
                    "free memory and other processes of the GPUs are unknown here: install "
                    "libnvidia-ml.so.1 of the driver, in a container with "
                    "NVIDIA_DRIVER_CAPABILITIES=compute,utility"});
  return rows;
}

std::vector<Finding> check_gpus(const DriverFacts& driver, const BuildFacts& build) {
  std::vector<Finding> rows;
  const std::string compiled = build.cuda_library.empty() ? "" : build.cuda_architectures;
  size_t unusable = 0;
  for (size_t i = 0; i < driver.gpus.size(); ++i) {
    bool is_usable = true;
    for (Finding& row : check_gpu(str("gpu ", i), driver.gpus[i], compiled)) {
      is_usable &= row.state != kMissing;
      rows.push_back(std::move(row));
    }
    unusable += !is_usable;
  }
  if (unusable < driver.gpus.size())
    for (Finding& row : rows)
      if (row.state == kMissing) {
        row.state = kWarning;
        row.remedy += "; until then set CUDA_VISIBLE_DEVICES to the other GPUs";
      }
  if (driver.peers.size() > 1) rows.push_back(check_links(driver));
  return rows;
}

std::vector<Finding> check_cuda_libraries(const BuildFacts& build, const DriverFacts& driver, bool has_gpu) {
  std::vector<Finding> rows;
  const FindingState absent = has_gpu ? kMissing : kNotNeeded;
  const std::string cuda = "libbough_cuda.so";
  if (build.cuda_library.empty())
    rows.push_back(
        {cuda, "not installed", absent,
         has_gpu ? "build Bough with nvcc 13 (make bundle or make wheel on a machine that has it)" : ""});
  else if (!build.cuda_library_opens)
    rows.push_back({cuda, str(build.cuda_library.string(), ": ", build.cuda_error), absent,
                    !has_gpu                    ? ""
                    : driver.cuda_error.empty() ? "install the torch build that Bough was built for"
                                                : "first mend the rows above"});
  else if (!build.cuda_error.empty() && driver.cuda_gpus > 0)
    rows.push_back({cuda, str("opens, but libtorch finds no GPU: ", build.cuda_error), kMissing,
                    str("the driver's CUDA works, so install the torch build again: ",
                        pip_install(build.torch), " --force-reinstall")});
  else rows.push_back({cuda, str("opens, compiled for ", build.cuda_architectures), kOk, ""});

  // Only several ranks on GPUs need it, so with one GPU a missing library is no fault.
  const bool several = driver.cuda_gpus > 1;
  const FindingState without = several ? kMissing : kNotNeeded;
  const std::string version = build.nccl_version ? str("NCCL ", nccl_version_text(build.nccl_version)) : "";
  if (build.nccl_library.empty())
    rows.push_back(
        {"libbough_nccl.so", str("not installed", version.empty() ? "" : ", ", version), without,
         several ? "install it beside libbough_cuda.so: a build with nvcc and nvidia-nccl-cu13 has it" : ""});
  else if (!build.nccl_library_error.empty())
    rows.push_back({"libbough_nccl.so", build.nccl_library_error, without,
                    several ? "install the NCCL of the torch build (nvidia-nccl-cu13)" : ""});
  else rows.push_back({"libbough_nccl.so", str("opens", version.empty() ? "" : ", ", version), kOk, ""});
  return rows;
}

std::vector<Finding> check_host(const HostFacts& host, int gpus) {
  std::vector<Finding> rows;
  rows.push_back(host.kernels_error.empty()
                     ? Finding{"CPU", str(host.cpu, ", kernels use ", host.kernels),
                               host.narrowed.empty() ? kOk : kWarning,
                               host.narrowed.empty() ? ""
                                                     : str("BOUGH_MAX_ISA leaves out ", host.narrowed,
                                                           ": unset it for full speed")}
                     : Finding{"CPU", str(host.cpu, ", ", host.kernels_error), kMissing,
                               "unset BOUGH_MAX_ISA, or give it one of these values"});
  const bool is_small = host.memory.available < int64_t{4} << 30;
  rows.push_back({"host memory",
                  str(format_bytes(static_cast<double>(host.memory.available)), " available of ",
                      format_bytes(static_cast<double>(host.memory.limit)), ", by ", host.memory.limited_by),
                  is_small ? kWarning : kOk,
                  is_small
                      ? "even small models need some GiB: end other processes, or raise the limit of the "
                        "container or job"
                      : ""});
  const bool fabric = gpus > 0 && host.has_infiniband && host.locked_memory >= 0;
  rows.push_back({"pinned memory", str("ulimit -l ", bytes_or_unlimited(host.locked_memory)),
                  gpus == 0 ? kNotNeeded
                  : fabric  ? kWarning
                            : kOk,
                  fabric ? "NCCL over InfiniBand needs more: ulimit -l unlimited, or docker run --ulimit "
                           "memlock=-1"
                         : ""});
  const bool small_shm = host.shm_total < int64_t{1} << 30;
  rows.push_back({"/dev/shm",
                  host.shm_total < 0 ? "there is none"
                                     : str(format_bytes(static_cast<double>(host.shm_free)), " free of ",
                                           format_bytes(static_cast<double>(host.shm_total))),
                  gpus > 1 ? small_shm ? kWarning : kOk : kNotNeeded,
                  gpus > 1 && small_shm
                      ? "NCCL between GPUs may fail below 1 GiB: docker run --shm-size=8g, or "
                        "mount -o remount,size=8G /dev/shm"
                      : ""});
  const bool few_files = host.open_files >= 0 && host.open_files < 1024;
  rows.push_back({"open files", str("ulimit -n ", host.open_files < 0 ? "unlimited" : str(host.open_files)),
                  few_files ? kWarning : kOk,
                  few_files ? "reward workers and servers need more: ulimit -n 65536" : ""});
  if (host.address_space >= 0)
    rows.push_back({"address space", str("ulimit -v ", bytes_or_unlimited(host.address_space)), kWarning,
                    "libtorch and CUDA reserve far more addresses than they use: ulimit -v unlimited"});
  for (const DiskFacts& disk : host.disks) rows.push_back(check_disk(disk));
  for (Finding& row : check_tools(host)) rows.push_back(std::move(row));
  return rows;
}

}  // namespace bough
