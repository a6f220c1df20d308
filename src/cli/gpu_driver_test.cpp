#include "cli/gpu_driver.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "base/base_test_util.h"

namespace bough {
namespace {

// Functions with the signatures of nvml.h and cuda.h. The devices are the addresses of kDevices.
char kDevices[2];
int fake_init() {
  return 0;
}
int fake_init_without_driver() {
  return 9;
}
const char* fake_error(int code) {
  return code == 9 ? "Driver Not Loaded" : "GPU is lost";
}
int fake_version(char* text, unsigned size) {
  std::strncpy(text, "580.65.06", size);
  return 0;
}
int fake_count(unsigned* count) {
  *count = 2;
  return 0;
}
int fake_handle(unsigned index, void** device) {
  *device = &kDevices[index];
  return 0;
}
int fake_lost_handle(unsigned index, void** device) {
  *device = &kDevices[index];
  return index == 1 ? 15 : 0;
}
int fake_name(void*, char* text, unsigned size) {
  std::strncpy(text, "NVIDIA H100 80GB HBM3", size);
  return 0;
}
int fake_capability(void*, int* major, int* minor) {
  *major = 9, *minor = 0;
  return 0;
}
int fake_memory(void* device, unsigned long long* total_free_used) {
  total_free_used[0] = 80ULL << 30;
  total_free_used[1] = device == &kDevices[0] ? 70ULL << 30 : 79ULL << 30;
  total_free_used[2] = total_free_used[0] - total_free_used[1];
  return 0;
}
// Rows of 24 bytes: pid at 0, bytes at 8. More rows than the first call has place for.
int fake_processes(void* device, unsigned* count, char* rows) {
  const unsigned found = device == &kDevices[0] ? 100 : 0, room = *count;
  *count = found;
  if (room < found) return 7;
  for (unsigned i = 0; i < found; ++i) {
    const unsigned pid = 1000 + i;
    const unsigned long long bytes = i == 0 ? 9ULL << 30 : ~0ULL;
    std::memcpy(rows + size_t{24} * i, &pid, sizeof pid);
    std::memcpy(rows + size_t{24} * i + 8, &bytes, sizeof bytes);
  }
  return 0;
}
int fake_one(void*, int* value) {
  *value = 1;
  return 0;
}
int fake_mig(void*, unsigned*, unsigned*) {
  return 3;  // not supported
}
int fake_ecc(void*, unsigned type, unsigned counter, unsigned long long* count) {
  *count = type == 1 && counter == 0 ? 2 : 99;
  return 0;
}
int fake_rows(void*, unsigned*, unsigned*, unsigned* pending, unsigned* failed) {
  *pending = 1, *failed = 0;
  return 0;
}
int fake_link(void*, unsigned link, int* active) {
  *active = link != 3;
  return link < 18 ? 0 : 2;
}

int fake_cu_init(unsigned) {
  return 0;
}
int fake_cu_init_802(unsigned) {
  return 802;
}
int fake_cu_error(int, const char** text) {
  *text = "system not yet initialized";
  return 0;
}
int fake_cu_version(int* version) {
  *version = 13000;
  return 0;
}
int fake_cu_count(int* count) {
  *count = 2;
  return 0;
}
int fake_cu_get(int* device, int index) {
  *device = 7 + index;
  return 0;
}
int fake_cu_name(char* text, int size, int device) {
  std::strncpy(text, device == 7 ? "first" : "second", static_cast<size_t>(size));
  return 0;
}
int fake_cu_attribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 8 : attribute == 76 ? 6 : -9;
  return 0;
}
int fake_cu_total(size_t* bytes, int) {
  *bytes = size_t{24} << 30;
  return 0;
}
int fake_cu_peer(int* can, int device, int peer) {
  *can = device == 7 && peer == 8;
  return 0;
}

using Functions = std::map<std::string, void*>;
template <class F>
void* address(F* function) {
  return reinterpret_cast<void*>(function);
}

Functions nvml_functions() {
  return {{"nvmlInit_v2", address(fake_init)},
          {"nvmlErrorString", address(fake_error)},
          {"nvmlSystemGetDriverVersion", address(fake_version)},
          {"nvmlDeviceGetCount_v2", address(fake_count)},
          {"nvmlDeviceGetHandleByIndex_v2", address(fake_handle)},
          {"nvmlDeviceGetName", address(fake_name)},
          {"nvmlDeviceGetCudaComputeCapability", address(fake_capability)},
          {"nvmlDeviceGetMemoryInfo", address(fake_memory)},
          {"nvmlDeviceGetComputeRunningProcesses_v3", address(fake_processes)},
          {"nvmlDeviceGetPersistenceMode", address(fake_one)},
          {"nvmlDeviceGetMigMode", address(fake_mig)},
          {"nvmlDeviceGetTotalEccErrors", address(fake_ecc)},
          {"nvmlDeviceGetRemappedRows", address(fake_rows)},
          {"nvmlDeviceGetNvLinkState", address(fake_link)}};
}

Functions cuda_functions() {
  return {{"cuInit", address(fake_cu_init)},
          {"cuDriverGetVersion", address(fake_cu_version)},
          {"cuGetErrorString", address(fake_cu_error)},
          {"cuDeviceGetCount", address(fake_cu_count)},
          {"cuDeviceGet", address(fake_cu_get)},
          {"cuDeviceGetName", address(fake_cu_name)},
          {"cuDeviceGetAttribute", address(fake_cu_attribute)},
          {"cuDeviceTotalMem_v2", address(fake_cu_total)},
          {"cuDeviceCanAccessPeer", address(fake_cu_peer)}};
}

Symbols library(Functions functions) {
  return [functions = std::move(functions)](const char* name) {
    const auto found = functions.find(name);
    return found == functions.end() ? nullptr : found->second;
  };
}

TEST(GpuDriver, ReadsWhatNvmlAndCudaAnswer) {
  const DriverFacts facts = query_driver(library(nvml_functions()), "", library(cuda_functions()), "");
  EXPECT_EQ(facts.nvml_error, "");
  EXPECT_EQ(facts.version, "580.65.06");
  ASSERT_EQ(facts.gpus.size(), 2u);
  const Gpu& gpu = facts.gpus[0];
  EXPECT_EQ(gpu.error, "");
  EXPECT_EQ(gpu.name, "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(gpu.major, 9);
  EXPECT_EQ(gpu.minor, 0);
  EXPECT_EQ(gpu.total, int64_t{80} << 30);
  EXPECT_EQ(gpu.free, int64_t{70} << 30);
  EXPECT_TRUE(gpu.lists_processes);
  ASSERT_EQ(gpu.processes.size(), 100u);
  EXPECT_EQ(gpu.processes[0].pid, 1000);
  EXPECT_EQ(gpu.processes[0].bytes, int64_t{9} << 30);
  EXPECT_EQ(gpu.processes[99].pid, 1099);
  EXPECT_EQ(gpu.processes[99].bytes, -1);
  EXPECT_EQ(gpu.persistence_mode, 1);
  EXPECT_EQ(gpu.compute_mode, -1) << "NVML has no such function here";
  EXPECT_EQ(gpu.mig_mode, -1);
  EXPECT_EQ(gpu.uncorrected_errors, 2);
  EXPECT_EQ(gpu.rows_pending, 1);
  EXPECT_EQ(gpu.nvlinks, 17);
  EXPECT_TRUE(facts.gpus[1].processes.empty());
  EXPECT_EQ(facts.cuda_error, "");
  EXPECT_EQ(facts.cuda_version, 13000);
  EXPECT_EQ(facts.cuda_gpus, 2);
  EXPECT_EQ(facts.peers, (std::vector<std::vector<int>>{{1, 1}, {0, 1}}));
}

TEST(GpuDriver, PassesEveryFactFromTheChildProcess) {
  const DriverFacts facts = query_driver(library(nvml_functions()), "a", library(cuda_functions()), "b");
  const Json json = facts;
  const Json again = parse_json(dump_line(json), "test").get<DriverFacts>();
  EXPECT_EQ(json, again);
  EXPECT_EQ(json.at("gpus").at(0).size(), 14u);
  EXPECT_EQ(json.size(), 8u);
}

TEST(GpuDriver, KeepsTheOtherGpusIfOneIsLost) {
  Functions functions = nvml_functions();
  functions["nvmlDeviceGetHandleByIndex_v2"] = address(fake_lost_handle);
  const DriverFacts facts = query_driver(library(functions), "", library(cuda_functions()), "");
  ASSERT_EQ(facts.gpus.size(), 2u);
  EXPECT_EQ(facts.gpus[0].error, "");
  expect_names(facts.gpus[1].error, {"nvmlDeviceGetHandleByIndex_v2", "15", "GPU is lost"});
}

TEST(GpuDriver, TakesCudasGpusWithoutNvml) {
  const std::string reason = "libnvidia-ml.so.1: cannot open shared object file";
  const DriverFacts facts = query_driver({}, reason, library(cuda_functions()), "");
  EXPECT_EQ(facts.nvml_error, reason);
  ASSERT_EQ(facts.gpus.size(), 2u);
  EXPECT_EQ(facts.gpus[1].name, "second");
  EXPECT_EQ(facts.gpus[1].major, 8);
  EXPECT_EQ(facts.gpus[1].minor, 6);
  EXPECT_EQ(facts.gpus[1].total, int64_t{24} << 30);
  EXPECT_EQ(facts.gpus[1].free, -1);
  EXPECT_FALSE(facts.gpus[1].lists_processes);
}

TEST(GpuDriver, ReportsErrorsWithTheirCodesAndTexts) {
  Functions nvml = nvml_functions(), cuda = cuda_functions();
  nvml["nvmlInit_v2"] = address(fake_init_without_driver);
  cuda["cuInit"] = address(fake_cu_init_802);
  const DriverFacts facts = query_driver(library(nvml), "", library(cuda), "");
  EXPECT_EQ(facts.nvml_error, "nvmlInit_v2: error 9 (Driver Not Loaded)");
  EXPECT_EQ(facts.cuda_error, "cuInit: error 802 (system not yet initialized)");
  EXPECT_EQ(facts.cuda_code, 802);
  EXPECT_EQ(facts.cuda_version, 13000) << "known without cuInit";
  EXPECT_TRUE(facts.gpus.empty());
}

TEST(GpuDriver, OfLibrariesWithoutFunctionsIsAnErrorText) {
  const DriverFacts facts = query_driver(library({}), "", library({}), "");
  EXPECT_EQ(facts.nvml_error, "nvmlInit_v2 is missing");
  EXPECT_EQ(facts.cuda_error, "cuInit is missing");
  const DriverFacts none = query_driver({}, "no nvml", {}, "no cuda");
  EXPECT_EQ(none.cuda_code, kNoCudaLibrary);
  EXPECT_EQ(none.cuda_error, "no cuda");
  EXPECT_TRUE(none.gpus.empty());
}

TEST(GpuDriver, OfThisMachineAnswersWithinItsTime) {
  const DriverFacts facts = query_driver(60);
  EXPECT_NE(facts.cuda_code, kDriverQueryFailed) << facts.cuda_error;
  EXPECT_EQ(facts.cuda_gpus > 0, facts.cuda_error.empty() && !facts.gpus.empty());
}

}  // namespace
}  // namespace bough
