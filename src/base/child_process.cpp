#include "base/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <exception>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "base/descriptor.h"
#include "base/error.h"

namespace bough {

namespace {

using std::chrono::milliseconds;
using ChildClock = std::chrono::steady_clock;

constexpr size_t kErrorsKept = 2048;
constexpr milliseconds kReapLimit{1000};
constexpr milliseconds kExitLimit{5000};  // from the end of the output to the end of a program
constexpr int kCannotStart = 127;
constexpr int kThrew = 71;  // the output is an exception's message

[[noreturn]] void no_child(const char* what) {
  throw IoError(str("cannot make a ", what, " for a child process: ", std::strerror(errno)));
}

void write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return;  // the parent has gone
    text.remove_prefix(static_cast<size_t>(written));
  }
}

// The child's first steps after the fork. Only async-signal-safe calls.
void begin_child(int output, int errors, pid_t parent) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(kThrew);
  const struct rlimit no_core = {0, 0};
  ::setrlimit(RLIMIT_CORE, &no_core);
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
  ::dup2(output, STDOUT_FILENO);
  ::dup2(errors, STDERR_FILENO);
}

[[noreturn]] void run_child(const std::function<std::string()>& work, int output, int errors, pid_t parent) {
  begin_child(errors, errors, parent);
  int status = 0;
  std::string text;
  try {
    text = work();
  } catch (const std::exception& error) {
    status = kThrew;
    text = error.what();
  } catch (...) {
    status = kThrew;
    text = "an exception of unknown type";
  }
  write_all(output, text);
  ::_exit(status);
}

enum class Piece { kSome, kEnd, kTimeout };
// Appends what the child has written; waits for it until the deadline.
Piece read_piece(ChildClock::time_point deadline, int descriptor, std::string& text) {
  std::array<char, 4096> buffer;
  while (true) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - ChildClock::now());
    if (left.count() <= 0) return Piece::kTimeout;
    struct pollfd ready = {descriptor, POLLIN, 0};
    const int found = ::poll(&ready, 1, static_cast<int>(std::min<int64_t>(left.count(), 60'000)));
    if (found < 0 && errno != EINTR) return Piece::kEnd;
    if (found <= 0) continue;
    const ssize_t size = ::read(descriptor, buffer.data(), buffer.size());
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return Piece::kEnd;
    text.append(buffer.data(), static_cast<size_t>(size));
    return Piece::kSome;
  }
}

// Appends what the child writes until it closes its end. Returns false at the deadline.
bool read_until(ChildClock::time_point deadline, int descriptor, std::string& text) {
  Piece piece = Piece::kSome;
  while (piece == Piece::kSome) piece = read_piece(deadline, descriptor, text);
  return piece == Piece::kEnd;
}

// Waits a moment for the child. A child within a system call that does not end is left to init.
std::optional<int> reap(pid_t child, ChildClock::time_point deadline) {
  int status = 0;
  while (true) {
    const pid_t ended = ::waitpid(child, &status, WNOHANG);
    if (ended == child) return status;
    if (ended < 0 && errno != EINTR) return {};
    if (ChildClock::now() >= deadline) return {};
    std::this_thread::sleep_for(milliseconds(2));
  }
}

std::string describe(int status) {
  if (WIFSIGNALED(status))
    return str("ended by signal ", WTERMSIG(status), " (", ::strsignal(WTERMSIG(status)), ")");
  return WEXITSTATUS(status) == 0 ? "" : str("ended with exit code ", WEXITSTATUS(status));
}

std::string end_of(int file) {
  const off_t size = ::lseek(file, 0, SEEK_END);
  if (size <= 0) return {};
  std::string text(std::min(static_cast<size_t>(size), kErrorsKept), '\0');
  const ssize_t found = ::pread(file, text.data(), text.size(), size - static_cast<off_t>(text.size()));
  text.resize(found < 0 ? 0 : static_cast<size_t>(found));
  return text;
}

}  // namespace

ChildResult run_in_child(const std::function<std::string()>& work, double seconds) {
  const auto deadline = ChildClock::now() + milliseconds(static_cast<int64_t>(seconds * 1000));
  const Descriptor errors(::memfd_create("child", MFD_CLOEXEC));
  if (errors.value < 0) no_child("memory file");
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) no_child("pipe");
  Descriptor read_end(ends[0]), write_end(ends[1]);
  const pid_t parent = ::getpid(), child = ::fork();
  if (child < 0) no_child("process");
  if (child == 0) run_child(work, write_end.value, errors.value, parent);
  ::setpgid(child, child);  // also here: the child may not have run yet when it is killed
  write_end.reset();

  ChildResult result;
  result.timed_out = !read_until(deadline, read_end.value, result.output);
  // The pipe is also closed by a child that crashes, and then its processes are still there.
  const std::optional<int> ended = result.timed_out ? std::nullopt : reap(child, deadline);
  ::kill(-child, SIGKILL);
  if (!ended) {
    result.timed_out = true;
    reap(child, ChildClock::now() + kReapLimit);
  }
  result.errors = end_of(errors.value);
  result.is_done = ended && WIFEXITED(*ended) && WEXITSTATUS(*ended) == 0;
  if (result.is_done) return result;
  if (!ended) result.failure = str("did not end within ", seconds, " s");
  else if (WIFEXITED(*ended) && WEXITSTATUS(*ended) == kThrew)
    result.failure = std::exchange(result.output, {});
  else result.failure = describe(*ended);
  result.output.clear();
  return result;
}

ChildProgram::ChildProgram(const std::vector<std::string>& command,
                           const std::vector<std::pair<std::string, std::string>>& environment)
    : errors_(::memfd_create("child", MFD_CLOEXEC)) {
  if (errors_.value < 0) no_child("memory file");
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) no_child("pipe");
  output_ = Descriptor(ends[0]);
  const Descriptor write_end(ends[1]);
  // All memory is allocated before the fork: another thread may hold the allocator's lock.
  std::vector<std::string> words = command, variables;
  for (char** variable = environ; *variable; ++variable) {
    const std::string_view text = *variable;
    const auto is_same = [&](const auto& added) { return text.starts_with(added.first + "="); };
    if (std::none_of(environment.begin(), environment.end(), is_same)) variables.emplace_back(text);
  }
  for (const auto& [name, value] : environment) variables.push_back(str(name, "=", value));
  const auto pointers = [](std::vector<std::string>& texts) {
    std::vector<char*> list;
    for (std::string& text : texts) list.push_back(text.data());
    list.push_back(nullptr);
    return list;
  };
  const std::vector<char*> arguments = pointers(words), all_variables = pointers(variables);
  const pid_t parent = ::getpid();
  child_ = ::fork();
  if (child_ < 0) no_child("process");
  if (child_ == 0) {
    begin_child(write_end.value, errors_.value, parent);
    ::execve(arguments[0], arguments.data(), all_variables.data());
    ::_exit(kCannotStart);
  }
  ::setpgid(child_, child_);
}

ChildProgram::~ChildProgram() {
  end();
}

ChildProgram::Next ChildProgram::next_line(double seconds, std::string* line) {
  const auto deadline = ChildClock::now() + milliseconds(static_cast<int64_t>(seconds * 1000));
  while (true) {
    if (const size_t newline = text_.find('\n'); newline != std::string::npos) {
      *line = text_.substr(0, newline);
      text_.erase(0, newline + 1);
      return Next::kLine;
    }
    if (is_closed_) return Next::kEnd;
    const Piece piece = read_piece(deadline, output_.value, text_);
    if (piece == Piece::kTimeout) return Next::kTimeout;
    is_closed_ = piece == Piece::kEnd;
  }
}

std::string ChildProgram::end() {
  if (child_ < 0) return how_;
  std::optional<int> ended;
  if (is_closed_) ended = reap(child_, ChildClock::now() + kExitLimit);
  ::kill(-child_, SIGKILL);
  if (!ended) ended = reap(child_, ChildClock::now() + kReapLimit);
  how_ = ended ? describe(*ended) : "cannot be ended";
  child_ = -1;
  return how_;
}

std::string ChildProgram::errors() const {
  return end_of(errors_.value);
}

}  // namespace bough
