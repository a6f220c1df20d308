#include "cli/self_tests.h"
#include "base/clock.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <new>
#include <thread>

#include "base/base_test_util.h"
#include "base/error.h"
#include "base/file.h"
#include "cli/doctor.h"
#include "kernels/common/cuda_library.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

// A kernel that is faulty in a test: it acts unless it is left out.
SelfTest faulty(const std::string& name, const std::function<void()>& act, bool is_much_faster = false) {
  return {name, {{name, "the slow way", is_much_faster}}, [name, act](c10::Device) {
            if (!is_left_out(name)) act();
          }};
}

void hang() {
  while (true) ::pause();
}

// The children's marker for what happens only once. Its folder is the test's.
bool is_first_time(const char* what) {
  const fs::path mark = fs::path(std::getenv("BOUGH_TEST_FOLDER")) / what;
  if (fs::exists(mark)) return false;
  std::ofstream(mark) << "1";
  return true;
}

std::vector<SelfTest> fake_tests() {
  return {
      {"right", {{"right", "the slow way"}}, [](c10::Device) {}},
      faulty("wrong", [] { throw WrongResult("wrong: result 0\ndiffers"); }),
      faulty("throws", [] { throw std::runtime_error("CUDA error: an illegal memory access"); }),
      faulty(
          "crashes", [] { std::signal(SIGSEGV, SIG_DFL), std::raise(SIGSEGV); }, true),
      faulty("aborts", [] { std::signal(SIGABRT, SIG_DFL), std::abort(); }),
      faulty("hangs", hang),
      faulty("hangs_once", [] { is_first_time("hung") ? hang() : void(); }),
      faulty("is_killed", [] { std::raise(SIGKILL); }),
      faulty("has_no_memory", [] { throw std::bad_alloc(); }),
      faulty("is_busy", [] { throw std::runtime_error("all CUDA-capable devices are busy or unavailable"); }),
      {"twice",
       {{"twice", "its plain kernel"}, {"twice/plain", "its reference"}},
       [](c10::Device) {
         if (!is_left_out("twice")) std::signal(SIGSEGV, SIG_DFL), std::raise(SIGSEGV);
         if (!is_left_out("twice/plain")) throw WrongResult("the plain kernel is wrong");
       }},
      {"never_right", {{"never_right", "the slow way"}}, [](c10::Device) { throw WrongResult("no"); }},
  };
}

// Not a test of its own: the program that the tests below start.
TEST(SelfTestChild, ServesItsParent) {
  const char* const load = std::getenv("BOUGH_TEST_LOAD");
  if (!load) return;
  std::vector<std::string> words;
  std::ifstream file("/proc/self/cmdline");
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  const auto begin = std::find(words.begin(), words.end(), "--");
  serve_self_tests(fake_tests(), {begin + 1, words.end()}, at::kCPU, [load = std::string(load)] {
    if (load == "hangs") hang();
    if (load == "crashes") std::abort();
    if (load == "throws") throw UserError("device cuda: found no GPU");
    if (load == "slow") std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  });
}

class SelfTestParent : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  SelfTestResult run(const std::vector<std::string>& names, const std::string& load = "") {
    std::vector<SelfTest> tests;
    for (const SelfTest& test : fake_tests())
      if (std::find(names.begin(), names.end(), test.name) != names.end()) tests.push_back(test);
    EXPECT_EQ(tests.size(), names.size());
    return run_self_tests(tests, {.command = {"/usr/bin/env", "BOUGH_TEST_LOAD=" + load,
                                              "BOUGH_TEST_FOLDER=" + folder_.string(),
                                              fs::read_symlink("/proc/self/exe").string(),
                                              "--gtest_filter=SelfTestChild.ServesItsParent", "--"},
                                  .loading_seconds = load == "hangs" ? 1.0 : 60,
                                  .test_seconds = 2,
                                  .progress_seconds = 1});
  }

  const fs::path folder_ = fs::path(::testing::TempDir()) / str("bough_self_test_", ::getpid());
};

TEST_F(SelfTestParent, LeavesOutKernelsThatAreWrongCrashOrHang) {
  const SelfTestResult result = run({"right", "wrong", "throws", "crashes", "aborts", "hangs", "hangs_once"});
  EXPECT_EQ(result.unable, "");
  EXPECT_EQ(result.num_tests, 7);
  EXPECT_GT(result.time, 1700000000);
  ASSERT_EQ(result.left_out(), (std::vector<std::string>{"wrong", "throws", "crashes", "aborts", "hangs"}))
      << "what hangs once, for a busy device, is not left out";
  EXPECT_EQ(result.faulty[0].why, "wrong: result 0 differs");
  EXPECT_EQ(result.faulty[0].replacement, "the slow way");
  EXPECT_EQ(result.faulty[1].why, "CUDA error: an illegal memory access");
  expect_names(result.faulty[2].why, {"signal 11", "Segmentation fault"});
  EXPECT_TRUE(result.faulty[2].is_much_faster);
  expect_names(result.faulty[3].why, {"signal 6"});
  EXPECT_EQ(result.faulty[4].why, "did not end within 2 s");
  expect_names(describe(result), {"wrong (wrong: result 0 differs), the slow way runs instead", "hangs",
                                  "bough doctor --json", "BOUGH_SELF_TEST=run"});
}

TEST_F(SelfTestParent, TestsTheNextSaferKernelToo) {
  const SelfTestResult result = run({"twice", "right"});
  ASSERT_EQ(result.left_out(), (std::vector<std::string>{"twice", "twice/plain"}));
  expect_names(result.faulty[0].why, {"signal 11"});
  EXPECT_EQ(result.faulty[0].replacement, "its plain kernel");
  EXPECT_EQ(result.faulty[1].why, "the plain kernel is wrong");
  EXPECT_EQ(result.faulty[1].replacement, "its reference");
}

TEST_F(SelfTestParent, KernelsThatTheUserLeftOutAreNotTested) {
  setenv(kLeaveOutVariable, "crashes", 1);
  const SelfTestResult result = run({"crashes", "wrong"});
  unsetenv(kLeaveOutVariable);
  EXPECT_EQ(result.left_out_before, std::vector<std::string>{"crashes"});
  EXPECT_EQ(result.left_out(), (std::vector<std::string>{"crashes", "wrong"}));
  ASSERT_EQ(result.faulty.size(), 1u);
}

TEST_F(SelfTestParent, RefusesADeviceOnWhichReferencesAreWrong) {
  try {
    run({"right", "never_right"});
    FAIL() << "not refused";
  } catch (const UserError& error) {
    expect_names(error.what(),
                 {"never_right", "without a kernel of Bough: no", "Xid", "BOUGH_SELF_TEST=off"});
  }
}

TEST_F(SelfTestParent, ABusyDeviceOrTooLittleMemoryIsNoFault) {
  for (const std::string name : {"is_killed", "has_no_memory", "is_busy"}) {
    const SelfTestResult result = run({name});
    EXPECT_NE(result.unable, "") << name;
    EXPECT_TRUE(result.faulty.empty()) << name;
    expect_names(describe(result), {"could not be finished", "the next start repeats it"});
  }
}

TEST_F(SelfTestParent, AFailureToLoadIsNoFaultOfAKernel) {
  expect_names(run({"right"}, "crashes").unable, {"loads the kernels", "signal 6"});
  expect_names(run({"right"}, "throws").unable, {"found no GPU"});
  expect_names(run({"right"}, "hangs").unable, {"not loaded within 1 s"});
}

TEST_F(SelfTestParent, ShowsProgressWhileKernelsAreCompiled) {
  ::testing::internal::CaptureStderr();
  const SelfTestResult result = run({"right"}, "slow");
  expect_names(::testing::internal::GetCapturedStderr(), {"still loading", "of at most 60 s"});
  EXPECT_EQ(result.unable, "");
}

class SelfTestCache : public SelfTestParent {
 protected:
  SelfTestResult cached(const SelfTestResult& tested, bool again = false) {
    return cached_self_test(folder_ / "cache", key_, again, [&] {
      ++num_tests_;
      SelfTestResult result = tested;
      result.time = now_seconds();
      return result;
    });
  }
  const SelfTestKey key_{"NVIDIA H100 80GB HBM3", "580.65.06, CUDA 13000", "2.11.0+cu130",
                         "0123456789abcdef"};
  const SelfTestResult with_fault_{.num_tests = 3, .faulty = {{"adamw_", "its reference", "crashed", false}}};
  SelfTestFacts facts_{.key = key_};
  std::atomic<int> num_tests_ = 0;
};

TEST_F(SelfTestCache, TestsOnceForAKey) {
  EXPECT_EQ(cached(with_fault_).faulty.size(), 1u);
  const SelfTestResult again = cached({});
  EXPECT_EQ(num_tests_, 1);
  ASSERT_EQ(again.faulty.size(), 1u);
  EXPECT_EQ(again.faulty[0].kernel, "adamw_");
  EXPECT_EQ(again.faulty[0].why, "crashed");
  EXPECT_EQ(again.num_tests, 3);
  for (SelfTestKey other : {SelfTestKey{"A100", key_.driver, key_.torch, key_.build_id},
                            SelfTestKey{key_.gpu, "590", key_.torch, key_.build_id},
                            SelfTestKey{key_.gpu, key_.driver, "2.12", key_.build_id},
                            SelfTestKey{key_.gpu, key_.driver, key_.torch, "f"}})
    EXPECT_FALSE(read_self_test(self_test_file(folder_ / "cache", other), other)) << other.gpu;
  write_file_atomically(self_test_file(folder_ / "cache", key_), "{");
  cached({});
  EXPECT_EQ(num_tests_, 2) << "a damaged file is replaced";
  EXPECT_TRUE(cached(with_fault_).faulty.empty());
}

TEST_F(SelfTestCache, TestsAgainIfAsked) {
  cached({});
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // times are in whole seconds
  EXPECT_EQ(cached(with_fault_, /*again=*/true).faulty.size(), 1u);
  EXPECT_EQ(cached({}).faulty.size(), 1u) << "the newer result";
  EXPECT_EQ(num_tests_, 2);
}

TEST_F(SelfTestCache, DoesNotKeepATestThatCouldNotBeFinished) {
  SelfTestResult busy;
  busy.unable = "the GPU is busy";
  EXPECT_EQ(cached(busy).unable, "the GPU is busy");
  facts_.result = read_self_test(self_test_file(folder_ / "cache", key_), key_);
  EXPECT_EQ(check_self_test(facts_)[0].state, FindingState::kWarning);
  expect_names(check_self_test(facts_)[0].found, {"the GPU is busy"});
  EXPECT_EQ(cached({}).unable, "");
  EXPECT_EQ(num_tests_, 2);
}

TEST_F(SelfTestCache, AResultCountsForTheSameLeftOutKernels) {
  cached(with_fault_);
  const auto tests_with = [&](const char* left_out) {
    setenv(kLeaveOutVariable, left_out, 1);
    const int before = num_tests_;
    SelfTestResult result = with_fault_;
    result.left_out_before = left_out_kernels();
    cached(result);
    unsetenv(kLeaveOutVariable);
    return num_tests_ - before;
  };
  EXPECT_EQ(tests_with("adamw_"), 0) << "inherited from a process that left it out";
  EXPECT_EQ(tests_with("rms_norm_forward"), 1);
  EXPECT_EQ(tests_with("rms_norm_forward"), 0);
  EXPECT_EQ(tests_with(""), 1) << "rms_norm_forward is not tested yet";
}

TEST_F(SelfTestCache, OneOfSeveralRanksTests) {
  for (const std::string unable : {"", "the GPU is busy"})
    for (const bool again : {false, true}) {
      num_tests_ = 0;
      std::vector<std::thread> ranks;
      std::atomic<int> num_unable = 0;
      for (int rank = 0; rank < 4; ++rank)
        ranks.emplace_back([&] {
          const SelfTestResult result = cached_self_test(folder_ / "cache", key_, again, [&] {
            ++num_tests_;
            std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // times are in whole seconds
            SelfTestResult tested;
            tested.time = now_seconds();
            tested.unable = unable;
            return tested;
          });
          num_unable += !result.unable.empty();
        });
      for (std::thread& rank : ranks) rank.join();
      EXPECT_EQ(num_tests_, 1) << again << unable;
      EXPECT_EQ(num_unable, unable.empty() ? 0 : 4);
      fs::remove_all(folder_ / "cache");
    }
}

TEST_F(SelfTestCache, WithoutAFolderTheResultIsUsedOnce) {
  EXPECT_EQ(cached_self_test({}, key_, false, [&] { return with_fault_; }).faulty.size(), 1u);
  std::ofstream(folder_ / "file") << "x";
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(cached_self_test(folder_ / "file", key_, false, [&] { return with_fault_; }).faulty.size(), 1u);
  expect_names(::testing::internal::GetCapturedStderr(), {"cannot be kept", "BOUGH_CACHE"});
}

TEST_F(SelfTestCache, TheDoctorNamesTheKernelsThatAreLeftOut) {
  EXPECT_TRUE(check_self_test({}).empty()) << "no GPU";
  ASSERT_EQ(check_self_test(facts_).size(), 1u);
  EXPECT_EQ(check_self_test(facts_)[0].found, "not tested yet");
  facts_.result = SelfTestResult{.num_tests = 20};
  facts_.age = 7200;
  EXPECT_EQ(check_self_test(facts_)[0].state, FindingState::kOk);
  expect_names(check_self_test(facts_)[0].found, {"20 tests", "2:00:00 ago"});
  facts_.result = with_fault_;
  EXPECT_EQ(check_self_test(facts_)[0].state, FindingState::kWarning);
  expect_names(check_self_test(facts_)[0].found, {"adamw_: crashed"});
  facts_.result->faulty[0].is_much_faster = true;
  EXPECT_EQ(check_self_test(facts_)[0].state, FindingState::kMissing) << "runs are refused";
  expect_names(check_self_test(facts_)[0].remedy, {"BOUGH_SELF_TEST=allow-slow"});
}

}  // namespace
}  // namespace bough
