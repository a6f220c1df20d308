#include "base/child_process.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "base/base_test_util.h"

namespace bough {
namespace {

TEST(ChildProcess, ReturnsWhatTheFunctionReturns) {
  const std::string text(1 << 20, 'x');  // more than a pipe holds
  const ChildResult result = run_in_child([&] { return text; }, 60);
  EXPECT_TRUE(result.is_done);
  EXPECT_EQ(result.output, text);
  EXPECT_EQ(result.failure, "");
}

TEST(ChildProcess, ChangesNothingInThisProcess) {
  int changed = 0;
  const pid_t here = ::getpid();
  const ChildResult result = run_in_child(
      [&] {
        changed = 1;
        return std::to_string(::getppid());
      },
      60);
  EXPECT_EQ(result.output, std::to_string(here));
  EXPECT_EQ(changed, 0);
}

TEST(ChildProcess, ReportsAnExceptionAndWhatTheChildPrinted) {
  const ChildResult result = run_in_child(
      []() -> std::string {
        ::dprintf(STDERR_FILENO, "the driver says no\n");
        throw std::runtime_error("no device");
      },
      60);
  EXPECT_FALSE(result.is_done);
  EXPECT_FALSE(result.timed_out);
  EXPECT_EQ(result.failure, "no device");
  EXPECT_EQ(result.output, "");
  EXPECT_EQ(result.errors, "the driver says no\n");
}

TEST(ChildProcess, SurvivesACrash) {
  const ChildResult result = run_in_child(
      []() -> std::string {
        std::signal(SIGSEGV, SIG_DFL);  // without a sanitizer's handler
        std::raise(SIGSEGV);
        return "";
      },
      60);
  EXPECT_FALSE(result.is_done);
  expect_names(result.failure, {"signal 11", "Segmentation fault"});
  const ChildResult exits = run_in_child([]() -> std::string { ::_exit(3); }, 60);
  EXPECT_EQ(exits.failure, "ended with exit code 3");
}

TEST(ChildProcess, EndsAFunctionThatHangsAndTheProcessesThatItStarted) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const ChildResult result = run_in_child(
      []() -> std::string {
        std::signal(SIGTERM, SIG_IGN);
        if (::fork() == 0) ::pause();
        while (true) ::pause();
      },
      0.2);
  EXPECT_TRUE(result.timed_out);
  EXPECT_FALSE(result.is_done);
  EXPECT_EQ(result.failure, "did not end within 0.2 s");
  // Both processes had the write end. If one still lived, the read would block until the test's time limit.
  ::close(ends[1]);
  char byte;
  EXPECT_EQ(::read(ends[0], &byte, 1), 0);
  ::close(ends[0]);
}

using Next = ChildProgram::Next;

ChildProgram shell(const std::string& script) {
  return {{"/bin/sh", "-c", script}, {{"BOUGH_ADDED", "1"}, {"HOME", "/nowhere"}}};
}

TEST(ChildProgram, ReportsByLines) {
  ChildProgram program = shell("echo $BOUGH_ADDED $HOME; printf 'a\\nb\\nno line'; echo why >&2; exit 3");
  std::string line;
  for (const std::string expected : {"1 /nowhere", "a", "b"}) {
    ASSERT_EQ(program.next_line(60, &line), Next::kLine);
    EXPECT_EQ(line, expected);
  }
  EXPECT_EQ(program.next_line(60, &line), Next::kEnd);
  EXPECT_EQ(program.end(), "ended with exit code 3");
  EXPECT_EQ(program.end(), "ended with exit code 3");
  EXPECT_EQ(program.errors(), "why\n");
  ChildProgram done = shell("true");
  EXPECT_EQ(done.next_line(60, &line), Next::kEnd);
  EXPECT_EQ(done.end(), "");
  ChildProgram crash = shell("kill -SEGV $$");
  EXPECT_EQ(crash.next_line(60, &line), Next::kEnd);
  expect_names(crash.end(), {"signal 11", "Segmentation fault"});
  ChildProgram none({"/no/such/program"}, {});
  EXPECT_EQ(none.next_line(60, &line), Next::kEnd);
  EXPECT_EQ(none.end(), "ended with exit code 127");
}

TEST(ChildProgram, IsEndedWithTheProcessesThatItStarted) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  {
    ChildProgram program = shell("trap '' TERM; sleep 1000 & echo begun; sleep 1000");
    std::string line;
    ASSERT_EQ(program.next_line(60, &line), Next::kLine);
    EXPECT_EQ(program.next_line(0.1, &line), Next::kTimeout);
  }
  ::close(ends[1]);
  char byte;
  EXPECT_EQ(::read(ends[0], &byte, 1), 0) << "a process still has the write end";
  ::close(ends[0]);
}

}  // namespace
}  // namespace bough
