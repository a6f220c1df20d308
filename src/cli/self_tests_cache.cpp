// The files that keep results of the self-test, one for each key.
#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/build_id.h"
#include "base/clock.h"
#include "base/descriptor.h"
#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "base/log.h"
#include "cli/doctor.h"
#include "cli/gpu_driver.h"
#include "cli/self_tests.h"
#include "kernels/common/cuda_library.h"

namespace bough {

namespace {

namespace fs = std::filesystem;

// A lock among processes (flock). It ends with the process that holds it.
class ResultLock {
 public:
  explicit ResultLock(const fs::path& file)
      : descriptor_(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
    if (descriptor_.value < 0) throw IoError(str("cannot lock ", file.string(), ": ", std::strerror(errno)));
    if (::flock(descriptor_.value, LOCK_EX | LOCK_NB) == 0) return;
    log_info("self-test: waits for another process that tests this GPU's kernels");
    int result = 0;
    do result = ::flock(descriptor_.value, LOCK_EX);
    while (result != 0 && errno == EINTR);
    if (result != 0) throw IoError(str("cannot lock ", file.string(), ": ", std::strerror(errno)));
  }

 private:
  Descriptor descriptor_;
};

// A result counts if exactly its kernels are left out now, or those that were left out before its test.
bool is_valid_now(const SelfTestResult& result) {
  const std::vector<std::string> now = left_out_kernels(), after = result.left_out();
  const auto all_in = [](const std::vector<std::string>& some, const std::vector<std::string>& all) {
    return std::all_of(some.begin(), some.end(), [&](const std::string& name) {
      return std::find(all.begin(), all.end(), name) != all.end();
    });
  };
  return all_in(result.left_out_before, now) && all_in(now, after);
}

}  // namespace

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FaultyKernel, kernel, replacement, why, is_much_faster)

void to_json(Json& json, const SelfTestResult& result) {
  json = {{"time", result.time},           {"seconds", result.seconds},
          {"num_tests", result.num_tests}, {"left_out_before", result.left_out_before},
          {"faulty", result.faulty},       {"unable", result.unable}};
}

void from_json(const Json& json, SelfTestResult& result) {
  json.at("time").get_to(result.time);
  json.at("seconds").get_to(result.seconds);
  json.at("num_tests").get_to(result.num_tests);
  json.at("left_out_before").get_to(result.left_out_before);
  json.at("faulty").get_to(result.faulty);
  json.at("unable").get_to(result.unable);
}

std::optional<SelfTestKey> self_test_key() {
  const std::optional<CudaDevice> device = first_cuda_device();
  if (!device) return {};
  return SelfTestKey{device->name, device->driver, read_torch_version().torch, build_id()};
}

fs::path self_test_file(const fs::path& folder, const SelfTestKey& key) {
  return folder / str("self-test-", file_name_part(str(key.gpu, " ", key.driver, " ", key.torch)), "-",
                      key.build_id, ".json");
}

std::optional<SelfTestResult> read_self_test(const fs::path& file, const SelfTestKey& key) {
  std::error_code ignored;
  if (!fs::exists(file, ignored)) return {};
  try {
    const Json json = read_json(file);
    if (json.value("tested_for", Json()) == Json(key)) return json.at("result").get<SelfTestResult>();
    log_info(str(file.string(), " is for another GPU, driver, torch or build; testing again"));
  } catch (const std::exception& error) {
    log_warning(str("the result of the self-test cannot be read: ", error.what(), "; testing again"));
  }
  return {};
}

SelfTestResult cached_self_test(const fs::path& folder, const SelfTestKey& key, bool again,
                                const std::function<SelfTestResult()>& test) {
  if (folder.empty()) return test();
  const int64_t begin = now_seconds();
  const fs::path file = self_test_file(folder, key);
  const auto valid = [&](int64_t least_time) -> std::optional<SelfTestResult> {
    auto result = read_self_test(file, key);
    if (!result || result->time < least_time || !is_valid_now(*result)) return {};
    // A result of tests that could not be finished counts only if another rank made it while this one waited.
    if (!result->unable.empty() && result->time <= begin) return {};
    return result;
  };
  if (!again)
    if (auto result = valid(0)) return *std::move(result);
  std::optional<ResultLock> lock;
  try {
    make_directories(folder);
    lock.emplace(fs::path(file.string() + ".lock"));
  } catch (const std::exception& error) {
    log_warning(str("the self-test's result cannot be kept for later starts: ", error.what(),
                    "; set BOUGH_CACHE to a folder that can be written"));
    return test();
  }
  // Another process may have tested while this one waited.
  if (auto result = valid(again ? begin : 0)) return *std::move(result);
  SelfTestResult result = test();
  try {
    write_file_atomically(file, dump_pretty({{"tested_for", key}, {"result", result}}));
  } catch (const std::exception& error) {
    log_warning(str("the self-test's result cannot be kept for later starts: ", error.what()));
  }
  return result;
}

}  // namespace bough
