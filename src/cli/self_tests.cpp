// The parent's side of the self-test: starts children, and decides which kernels are left out.
#include "cli/self_tests.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <set>
#include <string_view>

#include "base/child_process.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/format.h"
#include "base/log.h"
#include "kernels/common/cuda_library.h"

namespace bough {

namespace {

using SteadyClock = std::chrono::steady_clock;

std::string joined(const std::vector<std::string>& texts, const char* separator) {
  std::string list;
  for (const std::string& text : texts) list += str(list.empty() ? "" : separator, text);
  return list;
}

std::optional<std::string> after(std::string_view start, const std::string& text) {
  if (!text.starts_with(start)) return {};
  return text.substr(start.size());
}

class SelfTestRun {
 public:
  SelfTestRun(const std::vector<SelfTest>& tests, const SelfTestChild& child) : tests_(tests), child_(child) {
    for (const SelfTest& test : tests) pending_.push_back(test.name);
    result_.num_tests = std::ssize(tests);
    result_.left_out_before = left_out_kernels();
  }

  SelfTestResult run() {
    const auto begin = SteadyClock::now();
    while (!pending_.empty() && result_.unable.empty()) run_child();
    result_.seconds = seconds_since(begin);
    result_.time = now_seconds();
    return result_;
  }

 private:
  void run_child() {
    std::vector<std::string> command = child_.command;
    command.insert(command.end(), pending_.begin(), pending_.end());
    std::vector<std::pair<std::string, std::string>> environment = {
        {kLeaveOutVariable, joined(result_.left_out(), ",")}};
    // All kernels are loaded, and compiled if need be, with the context. Otherwise the first test of each
    // kernel would pay for it.
    if (!std::getenv("CUDA_MODULE_LOADING")) environment.emplace_back("CUDA_MODULE_LOADING", "EAGER");
    ChildProgram program(command, environment);
    if (wait_until_ready(program)) follow_tests(program);
  }

  // Reads the next line that the child reports; it has `seconds`. Returns false at the end of the output and
  // at the deadline.
  bool next_report(ChildProgram& program, double seconds, std::string* report) {
    const auto begin = SteadyClock::now();
    while (true) {
      const double left = seconds - seconds_since(begin);
      last_ = program.next_line(std::max(left, 0.0), report);
      if (last_ != ChildProgram::Next::kLine) return false;
      if (!report->starts_with(kSelfTestMark)) continue;
      report->erase(0, std::string_view(kSelfTestMark).size());
      return true;
    }
  }

  bool wait_until_ready(ChildProgram& program) {
    const auto begin = SteadyClock::now();
    std::string report;
    while (true) {
      if (next_report(program, child_.progress_seconds, &report)) {
        if (report == kSelfTestReady) return true;
        result_.unable = after(kSelfTestUnable, report).value_or(str("unexpected report ", quoted(report)));
        return false;
      }
      if (last_ == ChildProgram::Next::kEnd) {
        result_.unable = str("the process that loads the kernels ", how_it_ended(program));
        return false;
      }
      if (seconds_since(begin) > child_.loading_seconds) {
        result_.unable = str("libraries and kernels were not loaded within ", child_.loading_seconds, " s");
        return false;
      }
      log_info(str("self-test: still loading libraries and compiling kernels, ",
                   static_cast<int64_t>(seconds_since(begin)), " s of at most ", child_.loading_seconds,
                   " s"));
    }
  }

  void follow_tests(ChildProgram& program) {
    std::string test, report;  // test: that the child is in, if any
    while (next_report(program, child_.test_seconds, &report)) {
      if (report == kSelfTestDone) {
        BOUGH_CHECK(pending_.empty(), "the self-test ended without ", joined(pending_, ", "));
        return;
      }
      if (const auto name = after(kSelfTestBegin, report)) test = *name;
      else if (const auto why = after(kSelfTestUnable, report)) return (void)(result_.unable = *why);
      else if (const auto fault = after(kSelfTestFault, report)) return take_fault(test, *fault);
      else if (after(kSelfTestOk, report)) {
        std::erase(pending_, test);
        test.clear();
      }
    }
    if (last_ == ChildProgram::Next::kTimeout) return take_timeout(test);
    const std::string how = how_it_ended(program);
    // Linux kills processes if the host's memory is full.
    if (test.empty() || test == kLibtorchTest || how.starts_with("ended by signal 9 "))
      result_.unable = str("the process that tests ", how);
    else take_fault(test, how);
  }

  void take_timeout(const std::string& test) {
    const std::string how = str("did not end within ", child_.test_seconds, " s");
    if (test.empty() || test == kLibtorchTest) {
      result_.unable = str("a product of libtorch ", how, ": the GPU is busy or does not answer");
    } else if (repeated_.insert(test).second) {
      // The next child tests libtorch again, and then this test.
      std::erase(pending_, test);
      pending_.insert(pending_.begin(), test);
    } else {
      take_fault(test, how);
    }
  }

  // Leaves out the kernel that the test used. The test stays pending: its next kernel is tested, too.
  void take_fault(const std::string& name, const std::string& why) {
    const auto test =
        std::find_if(tests_.begin(), tests_.end(), [&](const SelfTest& each) { return each.name == name; });
    const std::vector<std::string> left_out = result_.left_out();
    const auto is_used = [&](const TestedKernel& kernel) {
      return std::find(left_out.begin(), left_out.end(), kernel.name) == left_out.end();
    };
    const std::string prefix = "device cuda: the self-test found a fault that no kernel of Bough explains: ";
    const std::string remedy =
        "; the GPU, its driver or libtorch computes wrong results: look for Xid lines in `dmesg`, try "
        "another "
        "GPU, or set BOUGH_SELF_TEST=off to run in spite of it";
    if (test == tests_.end()) throw UserError(str(prefix, why, remedy));
    const auto kernel = std::find_if(test->kernels.begin(), test->kernels.end(), is_used);
    if (kernel == test->kernels.end())
      throw UserError(str(prefix, name, " without a kernel of Bough: ", why, remedy));
    result_.faulty.push_back({kernel->name, kernel->replacement, why, kernel->is_much_faster});
    repeated_.erase(name);
    log_info(str("self-test: ", kernel->name, " is left out: ", why, "; testing ", kernel->replacement));
  }

  static std::string how_it_ended(ChildProgram& program) {
    const std::string how = program.end(), errors = program.errors();
    return str(how.empty() ? "ended early" : how, errors.empty() ? "" : str(", ", quoted(errors, 300)));
  }

  const std::vector<SelfTest>& tests_;
  const SelfTestChild& child_;
  std::vector<std::string> pending_;  // tests that no child has passed yet
  std::set<std::string> repeated_;    // tests that have not ended in time once
  ChildProgram::Next last_ = ChildProgram::Next::kLine;
  SelfTestResult result_;
};

}  // namespace

std::vector<std::string> SelfTestResult::left_out() const {
  std::vector<std::string> kernels = left_out_before;
  for (const FaultyKernel& each : faulty) kernels.push_back(each.kernel);
  return kernels;
}

SelfTestResult run_self_tests(const std::vector<SelfTest>& tests, const SelfTestChild& child) {
  return SelfTestRun(tests, child).run();
}

std::string describe(const SelfTestResult& result) {
  const std::string unfinished =
      result.unable.empty()
          ? ""
          : str("the self-test of the GPU's kernels could not be finished, and the next start repeats it: ",
                result.unable);
  if (result.faulty.empty()) return unfinished;
  std::string text = str(unfinished, unfinished.empty() ? "" : "; ",
                         "the self-test left out kernels that are faulty on this GPU:");
  for (const FaultyKernel& each : result.faulty)
    text += str(" ", each.kernel, " (", each.why, "), ", each.replacement, " runs instead;");
  return text + " send the output of `bough doctor --json`; BOUGH_SELF_TEST=run tests again";
}

namespace {

enum class SelfTestMode { kCached, kAgain, kAllowSlow, kOff };

SelfTestMode self_test_mode() {
  constexpr const char* kName = "BOUGH_SELF_TEST";
  const char* const given = std::getenv(kName);
  const std::string_view mode = given ? given : "";
  if (mode.empty()) return SelfTestMode::kCached;
  if (mode == "run") return SelfTestMode::kAgain;
  if (mode == "allow-slow") return SelfTestMode::kAllowSlow;
  if (mode == "off") return SelfTestMode::kOff;
  throw UserError(str("environment variable ", kName, ": got ", quoted(mode),
                      ", expected run, allow-slow or off; unset it for the cached result"));
}

void check_left_out_kernels(const std::vector<SelfTest>& tests) {
  std::vector<std::string> known;
  for (const SelfTest& test : tests)
    for (const TestedKernel& kernel : test.kernels) known.push_back(kernel.name);
  for (const std::string& name : left_out_kernels())
    if (std::find(known.begin(), known.end(), name) == known.end())
      throw UserError(str("environment variable ", kLeaveOutVariable, ": got ", quoted(name),
                          ", which is no kernel; expected names with commas between, of ",
                          joined(known, ", ")));
}

void refuse_slow_kernels(const SelfTestResult& result) {
  for (const FaultyKernel& each : result.faulty)
    if (each.is_much_faster)
      throw UserError(str("device cuda: the self-test found that ", each.kernel,
                          " is faulty on this GPU: ", each.why, "; ", each.replacement,
                          " is correct, but takes more than three times as long; set "
                          "BOUGH_SELF_TEST=allow-slow to run with it, BOUGH_SELF_TEST=run to test again, and "
                          "send the output of `bough doctor --json`"));
}

}  // namespace

std::string open_tested_cuda_library() {
  if (cuda_library_is_open()) {
    open_cuda_library();
    return "";
  }
  const SelfTestMode mode = self_test_mode();
  const std::vector<SelfTest> tests = self_tests();
  check_left_out_kernels(tests);
  const std::optional<SelfTestKey> key =
      mode == SelfTestMode::kOff || find_cuda_library().empty() ? std::nullopt : self_test_key();
  std::string warning;
  if (key) {
    const SelfTestResult result = cached_self_test(cache_folder(), *key, mode == SelfTestMode::kAgain, [&] {
      log_info(str("self-test of the kernels on ", key->gpu,
                   ", once for this driver and build (BOUGH_SELF_TEST=off skips it): loading libraries "
                   "and compiling kernels, at most ten minutes"));
      const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
      SelfTestResult tested = run_self_tests(tests, {.command = {program, kSelfTestCommand}});
      log_info(str("self-test: ", tested.num_tests, " tests in ", format_duration(tested.seconds)));
      return tested;
    });
    if (mode != SelfTestMode::kAllowSlow) refuse_slow_kernels(result);
    if (!result.faulty.empty()) setenv(kLeaveOutVariable, joined(result.left_out(), ",").c_str(), 1);
    warning = describe(result);
  }
  open_cuda_library();
  return warning;
}

}  // namespace bough
