// The child's side of the self-test, and the hidden command that runs it.
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <string_view>

#include "base/error.h"
#include "cli/command.h"
#include "cli/self_tests.h"
#include "kernels/common/cuda_library.h"
#include "kernels/common/device.h"

namespace bough {

namespace {

void write_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  const std::string line = str(kSelfTestMark, text, "\n");
  (void)!::write(STDOUT_FILENO, line.data(), line.size());  // the parent waits for the line, or is gone
}

// Whether the cause is the state of the device or the host, not a kernel.
bool lacks_a_device(const std::exception& error) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) || dynamic_cast<const std::bad_alloc*>(&error))
    return true;
  const std::string_view text = error.what();
  constexpr std::string_view kTexts[] = {"out of memory", "ALLOC_FAILED", "busy or unavailable"};
  return std::any_of(std::begin(kTexts), std::end(kTexts),
                     [&](std::string_view part) { return text.find(part) != std::string_view::npos; });
}

// An exception's text without libtorch's list of C++ frames.
std::string first_lines(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, std::min(text.find("\nException raised from"), size_t{300}));
}

// Returns whether the next test may follow.
bool run_test(const std::string& name, const std::function<void(c10::Device)>& test, c10::Device device) {
  write_line(str(kSelfTestBegin, name));
  try {
    test(device);
    synchronize(device);  // errors of a kernel appear here
  } catch (const std::exception& error) {
    // After an error of CUDA, every later call fails.
    write_line(str(lacks_a_device(error) ? kSelfTestUnable : kSelfTestFault, first_lines(error)));
    return false;
  }
  write_line(str(kSelfTestOk, name));
  return true;
}

}  // namespace

void serve_self_tests(const std::vector<SelfTest>& tests, const std::vector<std::string>& names,
                      c10::Device device, const std::function<void()>& load) {
  try {
    load();
    test_libtorch(device);  // makes the context, and loads the libraries that libtorch opens at its first use
    synchronize(device);
  } catch (const WrongResult&) {  // the same test below reports it
  } catch (const std::exception& error) {
    write_line(str(kSelfTestUnable, first_lines(error)));
    return;
  }
  write_line(kSelfTestReady);
  if (!run_test(kLibtorchTest, test_libtorch, device)) return;
  for (const std::string& name : names) {
    const auto test =
        std::find_if(tests.begin(), tests.end(), [&](const SelfTest& each) { return each.name == name; });
    BOUGH_CHECK(test != tests.end(), "there is no self-test ", name);
    if (!run_test(name, test->run, device)) return;
  }
  write_line(kSelfTestDone);
}

void add_self_test_command(CommandLine& line) {
  auto tests = std::make_shared<std::vector<std::string>>();
  Command command = line.add(kSelfTestCommand, "Tests the CUDA kernels: other commands start it", [tests] {
    serve_self_tests(self_tests(), *tests, at::kCUDA, [] { open_cuda_library(); });
  });
  command.hide();
  command.add_option("tests", *tests, "Names of tests, in order");
}

}  // namespace bough
