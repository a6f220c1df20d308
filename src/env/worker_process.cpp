#include "env/worker_process.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "base/error.h"

namespace bough {

namespace {

// A killed process can be in the kernel for a while (a hanging network file system); we do not hang with it.
constexpr std::chrono::milliseconds kReapLimit{2000};

constexpr std::string_view kMarkerVariable = "BOUGH_REWARD_WORKER=";

// Waits for the end of stdin, which comes when Bough is gone, however that went; then kills what bears a
// marker of the family $1. A few rounds: a process may be forking while the first one reads.
constexpr const char* kGuardScript = R"SH(
cd /
read -r line
for round in 1 2 3; do
  for file in $(grep -lsaF "BOUGH_REWARD_WORKER=$1." /proc/[0-9]*/environ); do
    process=${file#/proc/}
    kill -KILL "${process%/environ}" 2> /dev/null
  done
done
)SH";

// Between fork and exec only async-signal-safe calls are allowed: other threads may have held any lock.
struct Child {
  char* const* arguments;
  char* const* environment;
  int channel;
  int error_pipe;
  pid_t parent;
  bool dies_with_thread;
};
[[noreturn]] void run_child(const Child& child) {
  setpgid(0, 0);
  if (child.dies_with_thread) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != child.parent) _exit(127);  // it died before prctl
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  // dup2 clears close-on-exec of the copies; everything else that Bough has open stays with Bough.
  if (dup2(child.channel, STDIN_FILENO) >= 0 && dup2(child.channel, STDOUT_FILENO) >= 0) {
    close_range(3, ~0u, CLOSE_RANGE_CLOEXEC);
    execve(child.arguments[0], child.arguments, child.environment);
  }
  const int error = errno;
  [[maybe_unused]] const ssize_t written = write(child.error_pipe, &error, sizeof error);
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

// The texts as execve wants them; they must outlive it.
std::vector<char*> pointers_of(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));
  out.push_back(nullptr);
  return out;
}

std::vector<std::string> environment_with(const std::string& marker) {
  std::vector<std::string> out;
  for (char** variable = environ; *variable != nullptr; ++variable)
    if (!std::string_view(*variable).starts_with(kMarkerVariable)) out.emplace_back(*variable);
  if (!marker.empty()) out.push_back(str(kMarkerVariable, marker));
  return out;
}

// Processes that have the marker in their environment. Those of other users cannot be read and are not ours.
std::vector<pid_t> find_marked(const std::string& marker) {
  const std::string variable = str(kMarkerVariable, marker) + '\0';
  std::vector<pid_t> found;
  DIR* const folder = opendir("/proc");
  if (folder == nullptr) return found;
  std::string environment(1 << 20, '\0');  // more than a kernel gives by default
  while (const dirent* const entry = readdir(folder)) {
    const auto pid = static_cast<pid_t>(std::strtol(entry->d_name, nullptr, 10));
    if (pid <= 0) continue;
    const Descriptor file{open(str("/proc/", pid, "/environ").c_str(), O_RDONLY | O_CLOEXEC)};
    if (file.value < 0) continue;
    size_t size = 0;
    while (size < environment.size()) {
      const ssize_t n = read(file.value, environment.data() + size, environment.size() - size);
      if (n <= 0) break;
      size += static_cast<size_t>(n);
    }
    if (std::string_view(environment).substr(0, size).find(variable) != std::string_view::npos)
      found.push_back(pid);
  }
  closedir(folder);
  return found;
}

// In rounds, until none is left: one may have forked while the others were read.
void kill_marked(const std::string& marker) {
  const auto deadline = std::chrono::steady_clock::now() + kReapLimit;
  while (std::chrono::steady_clock::now() < deadline) {
    const std::vector<pid_t> found = find_marked(marker);
    if (found.empty()) return;
    for (const pid_t pid : found) kill(pid, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

WorkerProcess::WorkerProcess(const std::vector<std::string>& arguments, const WorkerProcessOptions& options)
    : marker_(options.marker) {
  const std::string& program = arguments.at(0);
  const std::vector<std::string> environment = environment_with(marker_);
  const std::vector<char*> argv = pointers_of(arguments), envp = pointers_of(environment);

  std::array<int, 2> pair;
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()) != 0) cannot_start(program, errno);
  Descriptor ours{pair[0]}, theirs{pair[1]};
  if (fcntl(ours.value, F_SETFL, O_NONBLOCK) != 0) cannot_start(program, errno);
  if (pipe2(pair.data(), O_CLOEXEC) != 0) cannot_start(program, errno);
  Descriptor error_read{pair[0]}, error_write{pair[1]};

  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ < 0) cannot_start(program, errno);
  if (pid_ == 0)
    run_child({argv.data(), envp.data(), theirs.value, error_write.value, parent, !options.outlives_thread});
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
    if (!marker_.empty()) kill_marked(marker_);
    if (!by_itself || !reaped) ended_ = "closed its connection";
    else if (WIFEXITED(status)) ended_ = str("exited with status ", WEXITSTATUS(status));
    else ended_ = str("was killed by signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")");
  }
  return ended_;
}

WorkerFamily::WorkerFamily()
    // No two processes of a machine have the same number at the same time.
    : name_(str(getpid(), "-", std::chrono::steady_clock::now().time_since_epoch().count())),
      guard_({"/bin/sh", "-c", kGuardScript, "bough-guard", name_}, {.outlives_thread = true}) {}

std::unique_ptr<WorkerProcess> WorkerFamily::start(const std::vector<std::string>& arguments) {
  return std::make_unique<WorkerProcess>(arguments,
                                         WorkerProcessOptions{.marker = str(name_, ".", num_started_++)});
}

}  // namespace bough
