#include "cli/doctor.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "base/base_test_util.h"

namespace bough {
namespace {

using enum FindingState;
constexpr int64_t kGiB = int64_t{1} << 30;

Gpu h100() {
  return {.name = "NVIDIA H100 80GB HBM3",
          .major = 9,
          .minor = 0,
          .total = 80 * kGiB,
          .free = 79 * kGiB,
          .lists_processes = true,
          .persistence_mode = 1,
          .mig_mode = 0,
          .compute_mode = 0,
          .uncorrected_errors = 0,
          .rows_pending = 0,
          .nvlinks = 18};
}

DriverFacts good_driver(int gpus = 1) {
  DriverFacts driver;
  driver.version = "580.65.06";
  driver.cuda_version = 13000;
  driver.cuda_gpus = gpus;
  for (int i = 0; i < gpus; ++i) driver.gpus.push_back(h100());
  driver.peers.assign(static_cast<size_t>(gpus), std::vector<int>(static_cast<size_t>(gpus), 1));
  return driver;
}

DriverFacts no_driver() {
  DriverFacts driver;
  driver.nvml_error = driver.cuda_error = "cannot open shared object file";
  driver.cuda_code = kNoCudaLibrary;
  return driver;
}

BuildFacts good_build() {
  BuildFacts build;
  build.version = "0.1.0";
  build.torch_folder = "/site-packages/torch";
  build.torch = {"2.11.0+cu130", "13.0"};
  build.cuda_architectures = "80 90a-real";
  build.cuda_library = "/bough/lib/libbough_cuda.so";
  build.cuda_library_opens = true;
  build.nccl_library = "/bough/lib/libbough_nccl.so";
  build.nccl_version = 22703;
  return build;
}

HostFacts good_host() {
  HostFacts host;
  host.cpu = "a CPU, 16 cores, avx2 avx512";
  host.kernels = "avx2 avx512";
  host.memory = {100 * kGiB, 128 * kGiB, "/proc/meminfo"};
  host.open_files = 65536;
  host.shm_total = host.shm_free = 64 * kGiB;
  host.python = "/usr/bin/python3";
  host.python_version = "3.11.2";
  host.disks = {{"disk: fileroot", "/runs", 500 * kGiB, true}, {"disk: cache", "/cache", 500 * kGiB, true}};
  return host;
}

const Finding& row(const std::vector<Finding>& rows, const std::string& what) {
  static const Finding none{"", "", kOk, ""};
  const auto found =
      std::find_if(rows.begin(), rows.end(), [&](const Finding& finding) { return finding.what == what; });
  EXPECT_NE(found, rows.end()) << "no row " << what;
  return found == rows.end() ? none : *found;
}

std::vector<Finding> all_rows(const DriverFacts& driver, const BuildFacts& build, const HostFacts& host) {
  const bool has = has_gpu(driver, host);
  std::vector<Finding> out;
  for (const auto& rows :
       {check_build(build, has), check_driver(driver, build, host), check_gpus(driver, build),
        check_cuda_libraries(build, driver, has), check_host(host, driver.cuda_gpus)})
    out.insert(out.end(), rows.begin(), rows.end());
  return out;
}

TEST(Doctor, FindsNothingToDoOnAGoodMachine) {
  for (const int gpus : {1, 2, 8})
    for (const Finding& finding : all_rows(good_driver(gpus), good_build(), good_host()))
      EXPECT_TRUE(finding.state == kOk || finding.state == kNotNeeded)
          << gpus << " GPUs: " << finding.what << ", " << finding.found << ", " << finding.remedy;
}

TEST(Doctor, NeedsNothingOfAGpuOnAMachineWithoutOne) {
  BuildFacts build = good_build();
  build.cuda_library = build.nccl_library = "";
  build.torch.cuda = "";
  const auto rows = all_rows(no_driver(), build, good_host());
  EXPECT_TRUE(std::none_of(rows.begin(), rows.end(), [](const Finding& finding) {
    return finding.state == kMissing || finding.state == kWarning;
  }));
  EXPECT_EQ(row(rows, "driver").state, kNotNeeded);
  EXPECT_EQ(row(rows, "libbough_cuda.so").state, kNotNeeded);
  EXPECT_EQ(row(rows, "pinned memory").state, kNotNeeded);
}

TEST(Doctor, NamesARemedyForEveryWarningAndMissingPart) {
  DriverFacts driver = good_driver(2);
  driver.version = "550.54.15";
  driver.cuda_version = 12040;
  driver.cuda_error = "cuInit: error 999 (unknown error)";
  driver.cuda_code = 999;
  driver.gpus[0].mig_mode = 1;
  driver.gpus[0].persistence_mode = 0;
  driver.gpus[0].rows_pending = 1;
  driver.gpus[0].compute_mode = 3;
  driver.gpus[1].error = "GPU is lost";
  HostFacts host = good_host();
  host.kernels_error = "BOUGH_MAX_ISA is wrong";
  host.memory.available = 1;
  host.has_infiniband = true;
  host.locked_memory = 65536;
  host.shm_total = 64 << 20;
  host.open_files = 256;
  host.address_space = 1 << 20;
  host.python_error = "no python3";
  host.sandbox_error = "no bwrap";
  host.disks = {{"disk: fileroot", "/runs", 1, true}, {"disk: cache", "", 0, false}};
  BuildFacts build = good_build();
  build.torch.cuda = "13.0";
  build.cuda_library = build.nccl_library = "";
  int found = 0;
  for (const Finding& finding : all_rows(driver, build, host)) {
    if (finding.state != kMissing && finding.state != kWarning) continue;
    ++found;
    EXPECT_FALSE(finding.remedy.empty()) << finding.what;
    EXPECT_EQ(finding.remedy.find('\n'), std::string::npos) << finding.what;
  }
  EXPECT_GE(found, 17);
}

TEST(Doctor, NamesTheDriverOrThePackageThatCuda13Needs) {
  DriverFacts driver = good_driver();
  driver.version = "570.124.06";
  driver.cuda_version = 12080;
  const Finding old = row(check_driver(driver, good_build(), good_host()), "driver");
  EXPECT_EQ(old.state, kMissing);
  EXPECT_EQ(old.found, "570.124.06, CUDA 12.8");
  expect_names(old.remedy, {"580", "cuda-compat-13-0", "LD_LIBRARY_PATH"});
  driver.cuda_version = 13000;  // of the package
  const Finding by_package = row(check_driver(driver, good_build(), good_host()), "driver");
  EXPECT_EQ(by_package.state, kOk);
  expect_names(by_package.found, {"compatibility package"});
  driver.version = "580.65.06";
  driver.cuda_version = 12080;  // of an older package in front
  const Finding shadowed = row(check_driver(driver, good_build(), good_host()), "driver");
  EXPECT_EQ(shadowed.state, kMissing);
  expect_names(shadowed.remedy, {"libcuda.so.1 is older"});
  driver.version = "";
  driver.cuda_version = 0;
  EXPECT_EQ(row(check_driver(driver, good_build(), good_host()), "driver").state, kWarning);
  driver.version = "580.65.06";  // CUDA did not answer
  EXPECT_EQ(row(check_driver(driver, good_build(), good_host()), "driver").state, kOk);
  driver.cuda_version = 12080;
  BuildFacts build = good_build();
  build.torch.cuda = "12.8";
  EXPECT_EQ(row(check_driver(driver, build, good_host()), "driver").state, kOk);
  EXPECT_EQ(least_driver("12.8"), 525);
  EXPECT_EQ(least_driver("13.0"), 580);
  EXPECT_EQ(least_driver(""), 0);
}

TEST(Doctor, NamesTheCauseIfCudaDoesNotStart) {
  const auto remedy = [](int code, const HostFacts& host = good_host()) {
    DriverFacts driver = good_driver();
    driver.cuda_code = code;
    driver.cuda_error = "it fails";
    const Finding found = row(check_driver(driver, good_build(), host), "CUDA");
    EXPECT_EQ(found.state, kMissing);
    return found.remedy;
  };
  expect_names(remedy(802), {"nvidia-fabricmanager"});
  expect_names(remedy(803), {"restart the machine"});
  expect_names(remedy(804), {"compatibility package"});
  expect_names(remedy(999), {"dmesg"});
  expect_names(remedy(kDriverQueryFailed), {"Xid"});
  HostFacts hidden = good_host();
  hidden.has_visible_devices = true;
  expect_names(remedy(100, hidden), {"CUDA_VISIBLE_DEVICES"});
}

TEST(Doctor, TakesADriverThatFailsForAGpuButNotADriverWithoutOne) {
  DriverFacts driver = no_driver();
  for (const auto& [code, has] : std::initializer_list<std::pair<int, bool>>{{kNoCudaLibrary, false},
                                                                             {34, false},
                                                                             {100, false},
                                                                             {802, true},
                                                                             {999, true},
                                                                             {kDriverQueryFailed, true}}) {
    driver.cuda_code = code;
    EXPECT_EQ(has_gpu(driver, good_host()), has) << code;
  }
}

TEST(Doctor, TellsAGpuWithoutADriverFromNoGpu) {
  HostFacts host = good_host();
  EXPECT_FALSE(has_gpu(no_driver(), host));
  host.pci_gpus = 1;
  EXPECT_TRUE(has_gpu(no_driver(), host));
  const auto rows = all_rows(no_driver(), good_build(), host);
  EXPECT_EQ(row(rows, "CUDA").state, kMissing);
  expect_names(row(rows, "CUDA").remedy, {"install the NVIDIA driver"});
  host.is_container = true;
  expect_names(row(all_rows(no_driver(), good_build(), host), "CUDA").remedy, {"--gpus all"});
}

TEST(Doctor, ShowsTheProcessesThatHoldAGpusMemory) {
  DriverFacts driver = good_driver();
  driver.gpus[0].free = 30 * kGiB;
  driver.gpus[0].processes = {{4711, 49 * kGiB}, {4712, -1}};
  const Finding used = row(check_gpus(driver, good_build()), "gpu 0: memory");
  EXPECT_EQ(used.state, kWarning);
  EXPECT_EQ(used.found, "30 GiB free of 80 GiB, used by pid 4711 (49 GiB), pid 4712");
  driver.gpus[0].processes.clear();
  const Finding hidden = row(check_gpus(driver, good_build()), "gpu 0: memory");
  EXPECT_EQ(hidden.state, kWarning);
  expect_names(hidden.remedy, {"on the host"});
  driver.gpus[0].free = -1;
  EXPECT_EQ(row(check_gpus(driver, good_build()), "gpu 0: memory").state, kOk);
}

TEST(Doctor, KnowsOnWhichGpusTheKernelsRun) {
  const std::string ours = "80 90a-real";
  EXPECT_EQ(code_for(ours, 8, 0), CodeFor::kMachineCode);
  EXPECT_EQ(code_for(ours, 8, 9), CodeFor::kMachineCode);
  EXPECT_EQ(code_for(ours, 9, 0), CodeFor::kMachineCode);
  EXPECT_EQ(code_for(ours, 10, 0), CodeFor::kPtx);
  EXPECT_EQ(code_for(ours, 12, 0), CodeFor::kPtx);
  EXPECT_EQ(code_for(ours, 7, 5), CodeFor::kNone);
  EXPECT_EQ(code_for("90a-real", 8, 0), CodeFor::kNone);
  EXPECT_EQ(code_for("90a-real", 10, 0), CodeFor::kNone);
  EXPECT_EQ(code_for("86-real", 8, 0), CodeFor::kNone);
  EXPECT_EQ(code_for("80-virtual", 9, 0), CodeFor::kPtx);
  EXPECT_EQ(code_for("100a 120-real", 10, 0), CodeFor::kMachineCode);
  EXPECT_EQ(code_for("", 9, 0), CodeFor::kNone);

  DriverFacts driver = good_driver();
  driver.gpus[0].major = 12;
  EXPECT_EQ(row(check_gpus(driver, good_build()), "gpu 0").state, kWarning);
  driver.gpus[0].major = 7;
  EXPECT_EQ(row(check_gpus(driver, good_build()), "gpu 0").state, kMissing);
}

TEST(Doctor, WarnsOfAGpuThatCannotBeUsedBesideOneThatCan) {
  DriverFacts driver = good_driver(2);
  driver.gpus[0].major = 6;
  const Finding old = row(check_gpus(driver, good_build()), "gpu 0");
  EXPECT_EQ(old.state, kWarning);
  expect_names(old.remedy, {"CUDA_VISIBLE_DEVICES"});
  driver.gpus[1].error = "GPU is lost";
  EXPECT_EQ(row(check_gpus(driver, good_build()), "gpu 0").state, kMissing);
  EXPECT_EQ(row(check_gpus(driver, good_build()), "gpu 1").state, kMissing);
}

TEST(Doctor, SaysWhyTheCudaLibraryIsOfNoUse) {
  BuildFacts build = good_build();
  build.cuda_library_opens = false;
  build.cuda_error = "libtorch_cuda.so: cannot open shared object file";
  const Finding closed = row(check_cuda_libraries(build, good_driver(), true), "libbough_cuda.so");
  EXPECT_EQ(closed.state, kMissing);
  expect_names(closed.found, {"/bough/lib/libbough_cuda.so", "libtorch_cuda.so"});
  EXPECT_EQ(row(check_cuda_libraries(build, no_driver(), false), "libbough_cuda.so").state, kNotNeeded);
  build.cuda_library_opens = true;
  build.cuda_error = "found no GPU";
  EXPECT_EQ(row(check_cuda_libraries(build, good_driver(), true), "libbough_cuda.so").state, kMissing);
  EXPECT_EQ(row(check_cuda_libraries(build, no_driver(), false), "libbough_cuda.so").state, kOk);
}

TEST(Doctor, NeedsNcclForSeveralGpusOnly) {
  BuildFacts build = good_build();
  EXPECT_EQ(row(check_cuda_libraries(build, good_driver(), true), "libbough_nccl.so").found,
            "opens, NCCL 2.27.3");
  build.nccl_library = "";
  EXPECT_EQ(row(check_cuda_libraries(build, good_driver(1), true), "libbough_nccl.so").state, kNotNeeded);
  EXPECT_EQ(row(check_cuda_libraries(build, good_driver(2), true), "libbough_nccl.so").state, kMissing);
  HostFacts host = good_host();
  host.shm_total = 64 << 20;
  EXPECT_EQ(row(check_host(host, 1), "/dev/shm").state, kNotNeeded);
  EXPECT_EQ(row(check_host(host, 2), "/dev/shm").state, kWarning);
}

TEST(Doctor, WarnsOfGpusWithoutPeerAccess) {
  DriverFacts driver = good_driver(2);
  EXPECT_EQ(row(check_gpus(driver, good_build()), "gpu links").found,
            "2 of 2 GPUs with NVLink, peer access in 2 of 2 pairs");
  driver.peers = {{1, 0}, {1, 1}};
  EXPECT_EQ(row(check_gpus(driver, good_build()), "gpu links").state, kWarning);
}

TEST(Doctor, RefusesFilesOfDifferentBuilds) {
  BuildFacts build = good_build();
  build.build_ids = {{"bough", "aa"}, {"libbough_cuda.so", "aa"}};
  EXPECT_EQ(row(check_build(build, true), "bough").state, kOk);
  build.build_ids[1].second = "bb";
  EXPECT_EQ(row(check_build(build, true), "bough").state, kMissing);
  expect_names(row(check_build(build, true), "bough").found, {"bough aa", "libbough_cuda.so bb"});
}

TEST(Doctor, ReadsTheVersionOfTorch) {
  const TorchVersion found = parse_torch_version(
      "from typing import Optional\n__all__ = ['__version__', 'cuda']\n__version__ = '2.11.0+cu130'\n"
      "debug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n");
  EXPECT_EQ(found.torch, "2.11.0+cu130");
  EXPECT_EQ(found.cuda, "13.0");
  const TorchVersion cpu = parse_torch_version("__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\n");
  EXPECT_EQ(cpu.torch, "2.11.0+cpu");
  EXPECT_EQ(cpu.cuda, "");
  BuildFacts build = good_build();
  build.torch = cpu;
  EXPECT_EQ(row(check_build(build, true), "torch").state, kMissing);
  EXPECT_EQ(row(check_build(build, false), "torch").state, kOk);
}

TEST(Doctor, WarnsOfAnOldPython) {
  HostFacts host = good_host();
  for (const auto& [version, state] : std::initializer_list<std::pair<const char*, FindingState>>{
           {"3.9.2", kWarning}, {"2.7.18", kWarning}, {"3.10.0", kOk}, {"3.14.0rc1", kOk}, {"", kWarning}}) {
    host.python_version = version;
    EXPECT_EQ(row(check_host(host, 0), "python3").state, state) << version;
  }
}

TEST(Doctor, ReadsTheFilesOfAnotherRoot) {
  namespace fs = std::filesystem;
  const TemporaryFolder temporary;
  const fs::path root = temporary.path();
  const auto write = [&](const std::string& path, const std::string& text) {
    fs::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  write("proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 41943040 kB\n");
  write("proc/cpuinfo", "processor : 0\nmodel name\t: A CPU of this test\n");
  write("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n");
  write("sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n");
  write("sys/bus/pci/devices/0000:01:00.1/vendor", "0x10de\n");
  write("sys/bus/pci/devices/0000:01:00.1/class", "0x040300\n");  // the sound of a GPU
  write("sys/bus/pci/devices/0000:02:00.0/vendor", "0x8086\n");
  write("sys/bus/pci/devices/0000:02:00.0/class", "0x030000\n");
  write("sys/class/infiniband/mlx5_0", "");
  write("dev/nvidiactl", "");
  write(".dockerenv", "");
  const HostFacts host = read_host((root / "not/made/yet").string(), root);
  EXPECT_EQ(host.memory.limit, 64 * kGiB);
  EXPECT_EQ(host.memory.available, 40 * kGiB);
  EXPECT_EQ(host.cpu.find("A CPU of this test"), 0u) << host.cpu;
  EXPECT_EQ(host.pci_gpus, 1);
  EXPECT_TRUE(host.has_infiniband);
  EXPECT_TRUE(host.has_driver_files);
  EXPECT_TRUE(host.is_container);
  EXPECT_EQ(host.shm_total, -1);
  EXPECT_EQ(host.disks[0].what, "disk: fileroot");
  EXPECT_TRUE(host.disks[0].is_writable);
  EXPECT_GT(host.disks[0].free, 0);
}

}  // namespace
}  // namespace bough
