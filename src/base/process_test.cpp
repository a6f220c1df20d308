// Tests of signals, processor features, clock, log and progress.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include "base/clock.h"
#include "base/cpu.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/progress.h"
#include "base/signals.h"

namespace bough {
namespace {

TEST(StopFlag, TheFirstSignalOnlySetsIt) {
  const StopFlag stop;
  EXPECT_FALSE(stop.requested());
  EXPECT_NO_THROW(stop.throw_if_requested());
  ::raise(SIGTERM);
  EXPECT_TRUE(stop.requested());
  EXPECT_EQ(stop.signal_number(), SIGTERM);
  EXPECT_THROW(stop.throw_if_requested(), Interrupted);
  EXPECT_THROW(StopFlag{}, InternalError);
}

TEST(StopFlag, StartsClearAndPutsHandlersBack) {
  struct sigaction before, after;
  ::sigaction(SIGINT, nullptr, &before);
  {
    const StopFlag stop;
    ::raise(SIGINT);
  }
  ::sigaction(SIGINT, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
  const StopFlag again;
  EXPECT_FALSE(again.requested());
}

TEST(StopFlag, ASecondControlCEndsTheProcess) {
  const pid_t child = ::fork();
  if (child == 0) {
    const StopFlag stop;
    ::raise(SIGINT);
    ::raise(SIGINT);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 130);
}

TEST(Cpu, FeaturesImplyEachOther) {
  const CpuFeatures features = cpu_features();
  EXPECT_TRUE(!features.avx512 || features.avx2);
  EXPECT_TRUE(!features.avx512_bf16 || features.avx512);
#if defined(__x86_64__)
  EXPECT_EQ(features.avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
#endif
  EXPECT_EQ(describe({}), "baseline");
  EXPECT_EQ(describe({.avx2 = true, .amx_bf16 = true}), "avx2 amx_bf16");
}

TEST(Cpu, TheUsersChoiceStays) {
  ::setenv("ONEDNN_MAX_CPU_ISA", "AVX2", 1);
  apply_cpu_workarounds();
  EXPECT_STREQ(std::getenv("ONEDNN_MAX_CPU_ISA"), "AVX2");
  ::unsetenv("ONEDNN_MAX_CPU_ISA");
  apply_cpu_workarounds();
  // If the user has not set the variable, apply_cpu_workarounds() sets only this value.
  const char* limit = std::getenv("ONEDNN_MAX_CPU_ISA");
  EXPECT_TRUE(!limit || !std::strcmp(limit, "AVX512_CORE_FP16"));
}

TEST(Clock, AFakeOneMovesWhenToldTo) {
  using namespace std::chrono_literals;
  FakeClock jumping;
  const auto start = jumping.now();
  jumping.sleep_for(90s);
  EXPECT_EQ(jumping.now() - start, 90s);
  jumping.sleep_until(start);  // in the past: no move
  EXPECT_EQ(jumping.now() - start, 90s);

  FakeClock waiting(FakeClock::Sleep::kWaits);
  std::thread sleeper([&] { waiting.sleep_for(10s); });
  while (waiting.num_sleeping() == 0) std::this_thread::yield();
  waiting.advance(9s);
  EXPECT_EQ(waiting.num_sleeping(), 1);
  waiting.advance(1s);
  sleeper.join();
  EXPECT_EQ(waiting.num_sleeping(), 0);
}

// Runs `body` with stderr redirected to a file (or a pseudo terminal) and returns what was written to stderr.
template <class Body>
std::string captured(Body body, bool terminal) {
  int read_end = -1, write_end = -1;
  if (terminal) {
    struct winsize size = {.ws_row = 24, .ws_col = 60};
    EXPECT_EQ(::openpty(&read_end, &write_end, nullptr, nullptr, &size), 0);
  } else {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    read_end = ends[0], write_end = ends[1];
  }
  ::setenv("TERM", "xterm", 1);
  const int saved = ::dup(STDERR_FILENO);
  ::dup2(write_end, STDERR_FILENO);
  body();
  ::dup2(saved, STDERR_FILENO);
  ::close(saved);
  // A terminal delivers output later and in pieces. The code reads until it sees a mark that is written last.
  const std::string mark(1, '\x1');
  EXPECT_EQ(::write(write_end, mark.data(), mark.size()), 1);
  std::string out;
  while (!out.ends_with(mark)) {
    char piece[4096];
    const ssize_t length = ::read(read_end, piece, sizeof piece);
    if (length <= 0) {
      ADD_FAILURE() << "the output ended before its mark: " << out;
      break;
    }
    out.append(piece, static_cast<size_t>(length));
  }
  if (out.ends_with(mark)) out.pop_back();
  ::close(read_end);
  ::close(write_end);
  return out;
}

TEST(Log, LevelsAndFile) {
  const auto path = std::filesystem::temp_directory_path() / str("bough_log_", ::getpid(), ".txt");
  const std::string shown = captured(
      [&] {
        set_log_file(path);
        log_debug("hidden {}");  // braces are text, not a format
        log_info("an info");
        set_log_level(LogLevel::kSilent);
        log_error("an error");
        set_log_level(LogLevel::kInfo);
        set_log_file("");
        log_warning("later");
      },
      false);
  EXPECT_EQ(shown.find("hidden"), std::string::npos);
  EXPECT_NE(shown.find("info: an info\n"), std::string::npos) << shown;
  EXPECT_EQ(shown.find("an error"), std::string::npos);
  EXPECT_NE(shown.find("warning: later\n"), std::string::npos) << shown;
  const std::string file = read_file(path);
  EXPECT_NE(file.find("debug: hidden {}\n"), std::string::npos) << file;
  EXPECT_NE(file.find("error: an error\n"), std::string::npos) << file;
  EXPECT_EQ(file.find("later"), std::string::npos);
  std::filesystem::remove(path);
  EXPECT_THROW(set_log_file("/tmp"), UserError);
  EXPECT_THROW(set_log_file("/proc/no/such"), IoError);
  EXPECT_THROW(parse_log_level("loud"), UserError);
  EXPECT_EQ(parse_log_level("warning"), LogLevel::kWarning);
}

TEST(Log, LinesPushTheStatusBlockDown) {
  const std::string shown = captured(
      [] {
        show_status("row one\nrow two");
        print_line("a line");
        show_status("");
      },
      true);
  EXPECT_EQ(shown, "row one\r\nrow two\r\033[1A\033[Ja line\r\nrow one\r\nrow two\r\033[1A\033[J");
  EXPECT_EQ(captured([] { show_status("nothing when piped"); }, false), "");
}

TEST(Progress, SaysWhatIsDoneAndWhatIsLeft) {
  captured(
      [] {
        Progress progress("sft", 1000, "steps", ProgressStyle::kLines);
        progress.advance(370, "loss 0.31");
        EXPECT_EQ(progress.line(37.0, 200), "sft  37% 370/1,000 steps  10/s  1:03 left  loss 0.31");
        EXPECT_EQ(progress.line(37.0, 10), "sft  37% …");
        Progress open_ended("reading", 0, "", ProgressStyle::kLines);
        EXPECT_EQ(open_ended.line(1.0, 80), "reading  0");
      },
      false);
}

TEST(Progress, PipedOutputIsPlainLinesAndABarEndsWithOne) {
  const std::string piped = captured(
      [] {
        Progress progress("work", 3);
        for (int i = 0; i < 3; ++i) progress.advance();
      },
      false);
  EXPECT_EQ(piped.substr(0, 10), "work: 3 in");
  EXPECT_EQ(std::count(piped.begin(), piped.end(), '\n'), 1);
  EXPECT_EQ(piped.find('\033'), std::string::npos);
  const std::string bar = captured(
      [] {
        Progress progress("work", 2);
        std::this_thread::sleep_for(std::chrono::milliseconds(120));
        progress.advance();
      },
      true);
  EXPECT_NE(bar.find("50% ━━━━━━━━━━──────────"), std::string::npos) << bar;
  EXPECT_NE(bar.find("work: 1 in"), std::string::npos) << bar;
  EXPECT_EQ(captured([] { Progress("quiet", 2, "", ProgressStyle::kSilent).advance(); }, false), "");
}

}  // namespace
}  // namespace bough
