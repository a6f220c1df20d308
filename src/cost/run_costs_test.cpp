#include "cost/run_costs.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "kernels/tree_attention/tree_attention_cost.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

class ProfileCache : public ::testing::Test {
 protected:
  void SetUp() override {
    remove_tree(folder_);
    set_log_level(LogLevel::kSilent);
  }
  void TearDown() override {
    remove_tree(folder_);
    set_log_level(LogLevel::kInfo);
  }

  // The result of `cached_profile`, measured or cached. Measurements are numbered.
  DeviceProfile get(const ProfileKey& key) {
    return cached_profile(folder_, key, [&] {
      auto profile = built_in_profile("h100", "bf16");
      profile.name = "measurement " + std::to_string(++measurements_);
      return profile;
    });
  }
  fs::path only_file() const {
    fs::path found;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      EXPECT_TRUE(found.empty()) << "a second file: " << entry.path();
      found = entry.path();
    }
    return found;
  }

  fs::path folder_ = fs::temp_directory_path() / ("bough_profile_cache_" + std::to_string(::getpid()));
  int measurements_ = 0;
  const ProfileKey key_{"Some(R) CPU @ 3 GHz, avx2", 4, "fp32"};
};

TEST_F(ProfileCache, MeasuresOnceAndThenReads) {
  EXPECT_EQ(get(key_).name, "measurement 1");
  const auto again = get(key_);
  EXPECT_EQ(again.name, "measurement 1");
  EXPECT_EQ(again.linear_forward.values, built_in_profile("h100", "bf16").linear_forward.values);
  EXPECT_EQ(measurements_, 1);
}

TEST_F(ProfileCache, OtherProcessorsThreadsAndTypesAreOtherMeasurements) {
  get(key_);
  get({key_.device, 8, key_.dtype});
  get({key_.device, key_.threads, "bf16"});
  get({"Some(R) CPU @ 4 GHz, avx2", key_.threads, key_.dtype});
  EXPECT_EQ(measurements_, 4);
  EXPECT_EQ(get(key_).name, "measurement 1");
  // Another processor may have the same file name. The file's content names the processor that was measured.
  EXPECT_EQ(get({"Some(R) CPU @ 3 GHz. avx2", key_.threads, key_.dtype}).name, "measurement 5");
}

TEST_F(ProfileCache, AMeasurementOfABusyMachineIsValidForTenMinutes) {
  const auto get_busy = [&] {
    return cached_profile(folder_, key_, [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // little CPU time, as on a busy machine
      ++measurements_;
      return built_in_profile("h100", "bf16");
    });
  };
  get_busy();
  get_busy();
  EXPECT_EQ(measurements_, 1);
  fs::last_write_time(only_file(), fs::last_write_time(only_file()) - std::chrono::minutes(11));
  get_busy();
  EXPECT_EQ(measurements_, 2);
}

TEST_F(ProfileCache, DamagedAndOldFilesAreMeasuredAgain) {
  get(key_);
  const auto whole = read_file(only_file());
  auto old = parse_json(whole, "test");
  old["measured_for"]["version"] = 0;
  auto negative = parse_json(whole, "test");
  negative["profile"]["threads"] = -1;
  for (const std::string& bad : {whole.substr(0, whole.size() / 2), std::string(), std::string("[]"),
                                 dump_line(old), dump_line(negative)}) {
    std::ofstream(only_file()) << bad;
    const int before = measurements_;
    EXPECT_EQ(get(key_).name, "measurement " + std::to_string(before + 1)) << bad.substr(0, 60);
    get(key_);
    EXPECT_EQ(measurements_, before + 1) << "not replaced: " << bad.substr(0, 60);
  }
}

TEST_F(ProfileCache, AFolderThatCannotBeWrittenIsNoError) {
  std::ofstream(folder_.string()) << "a file where the folder should be";
  EXPECT_EQ(get(key_).name, "measurement 1");
  EXPECT_EQ(get(key_).name, "measurement 2");
  EXPECT_EQ(cached_profile({}, key_, [] { return built_in_profile("a100", "bf16"); }).name, "a100");
}

TEST_F(ProfileCache, TheFolderComesFromTheEnvironment) {
  // If one variable is set, the next is not read.
  const auto keep = [](const char* name) {
    const char* value = std::getenv(name);
    return value ? std::optional<std::string>(value) : std::nullopt;
  };
  const auto own = keep("BOUGH_CACHE"), xdg = keep("XDG_CACHE_HOME"), home = keep("HOME");
  ::setenv("BOUGH_CACHE", "/a", 1);
  ::setenv("XDG_CACHE_HOME", "/b", 1);
  ::setenv("HOME", "/c", 1);
  EXPECT_EQ(cache_folder(), "/a");
  ::unsetenv("BOUGH_CACHE");
  EXPECT_EQ(cache_folder(), "/b/bough");
  ::setenv("XDG_CACHE_HOME", "", 1);
  EXPECT_EQ(cache_folder(), "/c/.cache/bough");
  ::unsetenv("HOME");
  EXPECT_EQ(cache_folder(), "");
  const auto restore = [](const char* name, const std::optional<std::string>& value) {
    value ? ::setenv(name, value->c_str(), 1) : ::unsetenv(name);
  };
  restore("BOUGH_CACHE", own);
  restore("XDG_CACHE_HOME", xdg);
  restore("HOME", home);
}

TEST(ThisCpu, SaysThreadsAndType) {
  const auto key = profile_key(at::kCPU, at::kBFloat16);
  EXPECT_EQ(key.threads, at::get_num_threads());
  EXPECT_EQ(key.dtype, "bf16");
  EXPECT_FALSE(key.device.empty());
}

// The run was planned with all CUDA kernels. In this process libbough_cuda.so is not open, as if the
// self-test had left out all of them.
TEST(RunProfile, MemoryIsPlannedForTheKernelsThatRun) {
  const auto folder = fs::path(::testing::TempDir()) / str("bough_run_profile_", ::getpid());
  fs::create_directories(folder);
  const DeviceProfile before = built_in_profile("h100", "bf16");
  save_run_profile(folder, before);
  ::testing::internal::CaptureStderr();
  const DeviceProfile now = run_profile(folder, "", at::kCUDA, at::kBFloat16, {});
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("other attention kernels"), std::string::npos);
  fs::remove_all(folder);
  EXPECT_EQ(now.kernels.attention, DeviceKernels::Attention::kReferenceOnGpu);
  EXPECT_TRUE(now.kernels.on_gpu());
  EXPECT_TRUE(now.kernels.widens_factors);
  const auto reread = DeviceProfile::from_json(now.to_json(), "the profile");
  EXPECT_EQ(reread.kernels.attention, now.kernels.attention);
  const AttentionHeads heads{.num_heads = 16, .num_kv_heads = 8, .head_dim = 128};
  EXPECT_GT(tree_attention_bytes(reread.kernels, {2, 4}, heads, 4096, 0),
            10 * tree_attention_bytes(before.kernels, {2, 4}, heads, 4096, 0));
}

}  // namespace
}  // namespace bough
