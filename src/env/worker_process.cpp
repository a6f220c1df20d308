#include "env/worker_process.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/error.h"

namespace bough {

namespace {

// A killed process can be in the kernel for a while (a hanging network file system); we do not hang with it.
constexpr std::chrono::milliseconds kReapLimit{2000};

// Between fork and exec only async-signal-safe calls are allowed: other threads may have held any lock.
[[noreturn]] void run_child(char* const* arguments, int channel, int error_pipe, pid_t parent) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);  // it died before prctl
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  // dup2 clears close-on-exec of the copies; everything else that Bough has open stays with Bough.
  if (dup2(channel, STDIN_FILENO) >= 0 && dup2(channel, STDOUT_FILENO) >= 0) {
    close_range(3, ~0u, CLOSE_RANGE_CLOEXEC);
    execv(arguments[0], arguments);
  }
  const int error = errno;
  [[maybe_unused]] const ssize_t written = write(error_pipe, &error, sizeof error);
  _exit(127);
}

[[noreturn]] void cannot_start(const std::string& program, int error) {
  throw IoError(str("cannot start ", quoted(program), ": ", std::strerror(error)));
}

// Closes what an early exit would leak.
struct Descriptor {
  int value = -1;
  ~Descriptor() { reset(); }
  void reset() {
    if (value >= 0) close(value);
    value = -1;
  }
};

}  // namespace

WorkerProcess::WorkerProcess(const std::vector<std::string>& arguments) {
  const std::string& program = arguments.at(0);
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);

  std::array<int, 2> pair;
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()) != 0) cannot_start(program, errno);
  Descriptor ours{pair[0]}, theirs{pair[1]};
  if (fcntl(ours.value, F_SETFL, O_NONBLOCK) != 0) cannot_start(program, errno);
  if (pipe2(pair.data(), O_CLOEXEC) != 0) cannot_start(program, errno);
  Descriptor error_read{pair[0]}, error_write{pair[1]};

  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ < 0) cannot_start(program, errno);
  if (pid_ == 0) run_child(argv.data(), theirs.value, error_write.value, parent);
  setpgid(pid_, pid_);  // also here: kill(-pid) must not come before the child has done it
  error_write.reset();
  int error = 0;
  ssize_t got;
  while ((got = read(error_read.value, &error, sizeof error)) < 0 && errno == EINTR) {
  }
  if (got > 0) {  // the pipe closes silently when exec succeeds
    waitpid(pid_, nullptr, 0);
    cannot_start(program, error);
  }
  std::swap(descriptor_, ours.value);
}

WorkerProcess::~WorkerProcess() {
  end(std::chrono::milliseconds(0));
  if (descriptor_ >= 0) close(descriptor_);
}

std::optional<size_t> WorkerProcess::send(std::string_view bytes) {
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t n = ::send(descriptor_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (n < 0) return std::nullopt;
    sent += static_cast<size_t>(n);
  }
  return sent;
}

bool WorkerProcess::receive(std::string& bytes) {
  // A worker that floods the socket must not keep us here: a bounded part now, the rest after the next poll.
  std::array<char, 1 << 16> buffer;
  for (int i = 0; i < 16; ++i) {
    const ssize_t n = recv(descriptor_, buffer.data(), buffer.size(), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    if (n == 0) return false;
    bytes.append(buffer.data(), static_cast<size_t>(n));
  }
  return true;
}

bool WorkerProcess::wait_for_exit(std::chrono::milliseconds limit) const {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (;;) {
    siginfo_t info{};  // WNOWAIT: stays a zombie, so that its number is not given to another process
    if (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid == pid_)
      return true;
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::string WorkerProcess::end(std::chrono::milliseconds grace) {
  if (ended_.empty()) {
    const bool by_itself = wait_for_exit(grace);
    kill(-pid_, SIGKILL);  // the group: also what the child left behind
    int status = 0;
    const bool reaped = wait_for_exit(kReapLimit) && waitpid(pid_, &status, WNOHANG) == pid_;
    if (!by_itself || !reaped) ended_ = "closed its connection";
    else if (WIFEXITED(status)) ended_ = str("exited with status ", WEXITSTATUS(status));
    else ended_ = str("was killed by signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")");
  }
  return ended_;
}

}  // namespace bough
