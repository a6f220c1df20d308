// The self-test of the CUDA kernels on the user's device, before the first use of the device.
//
// A child process opens libbough_cuda.so and compares each kernel with the CPU (kernels/self_test). It
// reports on stdout. This process has no CUDA context yet, so a kernel that crashes or hangs does it no harm.
// A faulty kernel is left out (kernels/common/cuda_library.h), and its replacement is tested, too. The
// result is kept in the cache folder, for one GPU model, driver, torch and build.
//
// The environment variable BOUGH_SELF_TEST:
//   not set      the cached result; if there is none, the test
//   run          the test, even if a result is cached
//   allow-slow   like not set; attention or products may be more than three times slower
//   off          no test, no cached result
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "kernels/self_test/self_tests.h"

namespace bough {

struct FaultyKernel {
  std::string kernel;
  std::string replacement;
  std::string why;              // "ended by signal 11 (Segmentation fault)"
  bool is_much_faster = false;  // than its replacement (TestedKernel)
};

struct SelfTestResult {
  int64_t time = 0;    // of its end, in seconds since 1970
  double seconds = 0;  // that it took
  int64_t num_tests = 0;
  std::vector<std::string> left_out_before;  // by the user; not tested
  std::vector<FaultyKernel> faulty;
  // Why the tests could not be finished: a busy device, too little memory, an error that no kernel caused. ""
  // if they were finished. The next start tests again.
  std::string unable;

  std::vector<std::string> left_out() const;  // left_out_before, then the faulty kernels
};
void to_json(Json& json, const SelfTestResult& result);
void from_json(const Json& json, SelfTestResult& result);

// How the tests are run.
struct SelfTestChild {
  std::vector<std::string> command;  // runs serve_self_tests(); names of tests are appended
  double loading_seconds = 600;      // until the libraries are loaded and the kernels compiled
  double test_seconds = 20;          // for each test
  double progress_seconds = 30;      // between two lines of progress
};
// Runs the tests in child processes: one, and one more after each fault. A test that does not end is repeated
// once: the device may have been busy. Throws UserError if a test fails although all its kernels are left
// out, or if libtorch's own ops are wrong.
SelfTestResult run_self_tests(const std::vector<SelfTest>& tests, const SelfTestChild& child);

// The child's side. Calls `load` and runs the tests with these names on `device`, after one of libtorch's
// ops. Ends at the first fault. Does not throw.
void serve_self_tests(const std::vector<SelfTest>& tests, const std::vector<std::string>& names,
                      c10::Device device, const std::function<void()>& load);

// The lines by which the child reports. Other lines on stdout are ignored: libraries may print, too.
inline constexpr const char* kSelfTestMark = "bough self-test: ";  // begins each line
inline constexpr const char* kSelfTestReady = "ready";             // libraries and kernels are loaded
inline constexpr const char* kSelfTestBegin = "begin ";            // + a test
inline constexpr const char* kSelfTestOk = "ok ";                  // + the test
inline constexpr const char* kSelfTestFault = "fault ";            // + why the test failed; the child ends
inline constexpr const char* kSelfTestUnable = "unable ";          // + why it cannot test; the child ends
inline constexpr const char* kSelfTestDone = "done";

inline constexpr const char* kLibtorchTest = "libtorch";  // the first test, of no kernel of Bough

// The hidden command of `bough` that calls serve_self_tests(); its arguments are the names of tests.
inline constexpr const char* kSelfTestCommand = "self-test-child";

// A result is valid for one key.
struct SelfTestKey {
  std::string gpu;     // "NVIDIA H100 80GB HBM3"
  std::string driver;  // "580.65.06, CUDA 13000"
  std::string torch;   // "2.11.0+cu130"
  std::string build_id;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SelfTestKey, gpu, driver, torch, build_id)
// The key of this process: of the GPU that is CUDA's device 0. nullopt if there is no GPU. Makes no context.
std::optional<SelfTestKey> self_test_key();

std::filesystem::path self_test_file(const std::filesystem::path& folder, const SelfTestKey& key);
// Returns nullopt if the file does not exist, cannot be read or is for another key. The latter two are
// logged.
std::optional<SelfTestResult> read_self_test(const std::filesystem::path& file, const SelfTestKey& key);

// Returns the cached result if it is valid for the kernels that are left out now; otherwise test(), which is
// then cached. again: a result that was cached before the call does not count. A lock makes one process test
// and the others wait for its result. Only these take a result whose tests could not be finished. An empty
// `folder` means no cache.
SelfTestResult cached_self_test(const std::filesystem::path& folder, const SelfTestKey& key, bool again,
                                const std::function<SelfTestResult()>& test);

// One warning about a result; "" if nothing is left out and the tests were finished.
std::string describe(const SelfTestResult& result);

// Opens libbough_cuda.so (open_cuda_library()), after the self-test as BOUGH_SELF_TEST says, without the
// faulty kernels. Returns the warning of describe(); "" if the library is open already. Throws UserError as
// open_cuda_library(); if a variable is wrong; or if attention or products would be more than three times
// slower, unless BOUGH_SELF_TEST allows it.
std::string open_tested_cuda_library();

}  // namespace bough
