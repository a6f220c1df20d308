#include "env/worker_process.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include "base/error.h"

namespace bough {
namespace {

constexpr std::chrono::milliseconds kLong{20'000};

// Reads until the other side closes or `enough` bytes are there.
std::string read_all(WorkerProcess& process, size_t enough = SIZE_MAX) {
  std::string bytes;
  pollfd watched{process.descriptor(), POLLIN, 0};
  while (bytes.size() < enough && poll(&watched, 1, static_cast<int>(kLong.count())) > 0) {
    if (!process.receive(bytes)) break;
  }
  return bytes;
}

TEST(WorkerProcess, TalksOverStdinAndStdout) {
  WorkerProcess process({"/bin/cat"});
  EXPECT_EQ(process.send("hello\n"), 6u);
  EXPECT_EQ(read_all(process, 6), "hello\n");
}

TEST(WorkerProcess, SendingNeverBlocks) {
  WorkerProcess process({"/bin/sleep", "1000"});
  const std::string large(50'000'000, 'x');
  const auto sent = process.send(large);
  ASSERT_TRUE(sent);
  EXPECT_LT(*sent, large.size());
  EXPECT_EQ(process.send("x"), 0u);
}

TEST(WorkerProcess, SendingToADeadOneIsNoSignal) {
  WorkerProcess process({"/bin/true"});
  EXPECT_EQ(read_all(process), "");
  EXPECT_EQ(process.end(kLong), "exited with status 0");
  EXPECT_EQ(process.send("x"), std::nullopt);
}

TEST(WorkerProcess, SaysHowItEnded) {
  EXPECT_EQ(WorkerProcess({"/bin/sh", "-c", "exit 7"}).end(kLong), "exited with status 7");
  EXPECT_EQ(WorkerProcess({"/bin/sh", "-c", "kill -9 $$"}).end(kLong), "was killed by signal 9 (Killed)");
  WorkerProcess sleeper({"/bin/sleep", "1000"});
  EXPECT_EQ(sleeper.end(std::chrono::milliseconds(0)), "closed its connection");
  EXPECT_EQ(sleeper.end(std::chrono::milliseconds(0)), "closed its connection");
}

TEST(WorkerProcess, InheritsNoOtherDescriptors) {
  const int kept_open = dup(STDERR_FILENO);  // as a library does that knows no close-on-exec
  WorkerProcess first({"/bin/cat"});         // its socket must not be seen by the second
  WorkerProcess second({"/bin/sh", "-c", "ls /proc/self/fd | wc -l"});
  EXPECT_EQ(read_all(second), "4\n");  // 0, 1, 2 and the folder that ls reads
  close(kept_open);
}

TEST(WorkerProcess, WhatCannotBeExecutedIsAnError) {
  try {
    WorkerProcess process({"/nowhere/python3"});
    FAIL();
  } catch (const IoError& error) {
    EXPECT_STREQ(error.what(), "cannot start '/nowhere/python3': No such file or directory");
  }
}

}  // namespace
}  // namespace bough
