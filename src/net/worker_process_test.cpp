#include "net/worker_process.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>
#include <csignal>

#include <fstream>
#include <string>

#include "base/error.h"
#include "net/net_test_util.h"

namespace bough {
namespace {

constexpr std::chrono::milliseconds kLong{20'000};

// Reads until the process closes its output or has sent `enough` bytes.
std::string read_all(WorkerProcess& process, size_t enough = SIZE_MAX) {
  std::string bytes;
  pollfd watched{process.descriptor(), POLLIN, 0};
  while (bytes.size() < enough && poll(&watched, 1, static_cast<int>(kLong.count())) > 0) {
    if (!process.receive(bytes)) break;
  }
  return bytes;
}

class WorkerProcessTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (GetParam() && !can_make_pid_namespaces()) GTEST_SKIP() << "no PID namespaces here";
  }
};
INSTANTIATE_TEST_SUITE_P(Kept, WorkerProcessTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "InANamespace" : "ByAShell"; });

TEST_P(WorkerProcessTest, TalksOverStdinAndStdout) {
  WorkerProcess process({"/bin/cat"}, GetParam());
  EXPECT_EQ(process.send("hello\n"), 6u);
  EXPECT_EQ(read_all(process, 6), "hello\n");
}

TEST_P(WorkerProcessTest, SendingNeverBlocks) {
  WorkerProcess process({"/bin/sleep", "1000"}, GetParam());
  const std::string large(50'000'000, 'x');
  const auto sent = process.send(large);
  ASSERT_TRUE(sent);
  EXPECT_LT(*sent, large.size());
  EXPECT_EQ(process.send("x"), 0u);
}

TEST_P(WorkerProcessTest, SendingToADeadProcessRaisesNoSignal) {
  WorkerProcess process({"/bin/true"}, GetParam());
  EXPECT_EQ(read_all(process), "");
  EXPECT_EQ(process.end(kLong), "exited with status 0");
  EXPECT_EQ(process.send("x"), std::nullopt);
}

TEST_P(WorkerProcessTest, SaysHowItEnded) {
  EXPECT_EQ(WorkerProcess({"/bin/sh", "-c", "exit 7"}, GetParam()).end(kLong), "exited with status 7");
  EXPECT_EQ(WorkerProcess({"/bin/sh", "-c", "kill -9 $$"}, GetParam()).end(kLong),
            "was killed by signal 9 (Killed)");
  WorkerProcess sleeper({"/bin/sleep", "1000"}, GetParam());
  EXPECT_EQ(sleeper.end(std::chrono::milliseconds(0)), "closed its connection");
  EXPECT_EQ(sleeper.end(std::chrono::milliseconds(0)), "closed its connection");
}

TEST_P(WorkerProcessTest, InheritsNoOtherDescriptors) {
  const int kept_open = dup(STDERR_FILENO);       // like a library that does not set close-on-exec
  WorkerProcess first({"/bin/cat"}, GetParam());  // the second process must not inherit this socket
  WorkerProcess second({"/bin/sh", "-c", "ls /proc/self/fd | wc -l"}, GetParam());
  EXPECT_EQ(read_all(second), "4\n");  // stdin, stdout, stderr and the directory that ls reads
  close(kept_open);
}

// Three processes that try to survive: sleeps that ignore signals. One is a daemon without an environment.
// One was started by a program that has ended.
TEST_P(WorkerProcessTest, ItsChildProcessesEndWithIt) {
  const std::string mark = str("8", getpid(), GetParam() ? ".125" : ".0625");
  const std::string script = str("trap '' TERM HUP INT QUIT; sleep ", mark, " & setsid sleep ", mark,
                                 " & (env -i setsid sleep ", mark, " < /dev/null > /dev/null 2>&1 &); ");
  for (const char* end : {"exit 3", "kill -SEGV $$", "exec sleep 1000"}) {
    WorkerProcess process({"/bin/sh", "-c", script + "echo up; read -r line; " + end}, GetParam());
    EXPECT_EQ(read_all(process, 3), "up\n");
    expect_gone([&] { return processes_with("sleep" + std::string(1, '\0') + mark).size() < 3; },
                "fewer than three started");
    process.send("go\n");
    const std::string how = process.end(std::chrono::milliseconds(300));
    EXPECT_EQ(how, end == std::string_view("exit 3")          ? "exited with status 3"
                   : end == std::string_view("kill -SEGV $$") ? "was killed by signal 11 (Segmentation fault)"
                                                              : "closed its connection");
    expect_none_with(mark);
  }
}

std::string ignored_signals() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("SigIgn:")) return line + "\n";
  return "";
}

// A shell starts background processes with SIGINT ignored; workers must not ignore it. Signals that this
// process ignores (nohup's SIGHUP) are ignored by workers, too.
TEST_P(WorkerProcessTest, SignalsAreHandledAsInAnyProgram) {
  // A shell may also have started this test with SIGINT ignored.
  const auto interrupt = std::signal(SIGINT, SIG_DFL), quit = std::signal(SIGQUIT, SIG_DFL);
  WorkerProcess process({"/bin/sh", "-c", "grep SigIgn /proc/self/status; kill -INT $$; echo deaf"},
                        GetParam());
  EXPECT_EQ(read_all(process), ignored_signals());
  std::signal(SIGINT, interrupt);
  std::signal(SIGQUIT, quit);
}

TEST_P(WorkerProcessTest, AProgramThatCannotBeExecutedIsAnError) {
  try {
    WorkerProcess process({"/nowhere/python3"}, GetParam());
    FAIL();
  } catch (const IoError& error) {
    EXPECT_STREQ(error.what(), "cannot start '/nowhere/python3': No such file or directory");
  }
}

}  // namespace
}  // namespace bough
