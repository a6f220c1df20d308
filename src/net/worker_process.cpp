#include "net/worker_process.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "base/descriptor.h"
#include "base/error.h"

namespace bough {

namespace {

// The longest wait until a killed process is gone. It can stay in the kernel for a while (a hanging network
// file system).
constexpr std::chrono::milliseconds kReapLimit{2000};

// The keeper if there is no PID namespace: runs the program "$@". A shell starts background processes with
// SIGINT and SIGQUIT ignored and an empty stdin; the script undoes this. It reads the list of children
// without starting a process. While `sleep` runs, the shell reaps dead children.
constexpr const char* kKeeperScript = R"SH(
end() {
  kill -KILL "$worker" 2> /dev/null
  wait "$worker"
  for round in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    children=
    read -r children < "/proc/$$/task/$$/children"
    [ -z "$children" ] && break
    kill -KILL $children
    sleep 0.02 &
    wait $!
  done
} 2> /dev/null
env --default-signal=INT,QUIT true 2> /dev/null && set -- env --default-signal=INT,QUIT "$@"
exec 3<&0
trap 'end; exit 143' TERM
"$@" <&3 3<&- &
worker=$!
exec < /dev/null > /dev/null 3<&-
wait "$worker" 2> /dev/null
status=$?
end
exit "$status"
)SH";

// Arguments for the code between fork and exec. There, only async-signal-safe calls are allowed: at the fork,
// another thread may have held any lock.
struct Child {
  char* const* arguments;
  int channel;
  int error_pipe;
  pid_t parent;
  bool is_keeper;
};
[[noreturn]] void run_child(const Child& child) {
  setpgid(0, 0);
  if (child.is_keeper) prctl(PR_SET_CHILD_SUBREAPER, 1);  // exec keeps this setting and the next one
  prctl(PR_SET_PDEATHSIG, child.is_keeper ? SIGTERM : SIGKILL);
  if (getppid() != child.parent) _exit(127);  // the parent died before prctl
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  // dup2 clears close-on-exec of the copies. execv closes all other descriptors of Bough.
  if (dup2(child.channel, STDIN_FILENO) >= 0 && dup2(child.channel, STDOUT_FILENO) >= 0) {
    close_range(3, ~0u, CLOSE_RANGE_CLOEXEC);
    execv(child.arguments[0], child.arguments);
  }
  const int error = errno;
  [[maybe_unused]] const ssize_t written = write(child.error_pipe, &error, sizeof error);
  _exit(127);
}

[[noreturn]] void cannot_start(const std::string& program, int error) {
  throw IoError(str("cannot start ", quoted(program), ": ", std::strerror(error)));
}

std::string find_bubblewrap() {
  const char* variable = std::getenv("PATH");
  std::string_view path = variable == nullptr ? "/usr/bin:/bin" : variable;
  while (!path.empty()) {
    const std::string candidate = str(path.substr(0, path.find(':')), "/bwrap");
    if (candidate.front() == '/' && access(candidate.c_str(), X_OK) == 0) return candidate;
    path.remove_prefix(std::min(path.find(':'), path.size() - 1) + 1);
  }
  return "";
}

// The command line of the keeper, followed by the program.
std::vector<std::string> kept(const std::vector<std::string>& program, bool in_namespace) {
  std::vector<std::string> out;
  if (in_namespace)
    out = {find_bubblewrap(), "--dev-bind",        "/", "/", "--proc", "/proc",
           "--unshare-pid",   "--die-with-parent", "--"};
  else out = {"/bin/sh", "-c", kKeeperScript, "bough-keeper"};
  out.insert(out.end(), program.begin(), program.end());
  return out;
}

}  // namespace

bool can_make_pid_namespaces() {
  if (find_bubblewrap().empty()) return false;
  WorkerProcess probe({"/bin/true"}, /*in_namespace=*/true);
  return probe.end(std::chrono::seconds(10)) == "exited with status 0";
}

WorkerProcess::WorkerProcess(const std::vector<std::string>& arguments, bool in_namespace)
    : in_namespace_(in_namespace) {
  const std::string& program = arguments.at(0);
  if (access(program.c_str(), X_OK) != 0) cannot_start(program, errno);
  const std::vector<std::string> keeper = kept(arguments, in_namespace);
  std::vector<char*> argv;
  for (const std::string& text : keeper) argv.push_back(const_cast<char*>(text.c_str()));
  argv.push_back(nullptr);

  std::array<int, 2> pair;
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data()) != 0) cannot_start(program, errno);
  Descriptor ours(pair[0]), theirs(pair[1]);
  if (fcntl(ours.value, F_SETFL, O_NONBLOCK) != 0) cannot_start(program, errno);
  if (pipe2(pair.data(), O_CLOEXEC) != 0) cannot_start(program, errno);
  Descriptor error_read(pair[0]), error_write(pair[1]);

  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ < 0) cannot_start(program, errno);
  if (pid_ == 0) run_child({argv.data(), theirs.value, error_write.value, parent, !in_namespace});
  setpgid(pid_, pid_);  // the child does it too; kill(-pid) must not come before the group exists
  error_write.reset();
  int error = 0;
  ssize_t got;
  while ((got = read(error_read.value, &error, sizeof error)) < 0 && errno == EINTR) {
  }
  if (got > 0) {  // if exec succeeds, the pipe closes without a message
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
  return receive_what_is_there(descriptor_, bytes);
}

bool receive_what_is_there(int descriptor, std::string& bytes) {
  std::array<char, 1 << 16> buffer;
  for (int i = 0; i < 16; ++i) {
    const ssize_t n = recv(descriptor, buffer.data(), buffer.size(), 0);
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
    siginfo_t info{};  // WNOWAIT: the child stays a zombie, so its process id is not reused
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
    if (!by_itself && !in_namespace_) {
      kill(pid_, SIGTERM);
      kill(pid_, SIGCONT);
      wait_for_exit(kReapLimit);
    }
    kill(-pid_, SIGKILL);  // the process group
    int status = 0;
    const bool reaped = wait_for_exit(kReapLimit) && waitpid(pid_, &status, WNOHANG) == pid_;
    // Keepers end as shells do: with 128 plus the signal that ended the program.
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (!by_itself || !reaped) ended_ = "closed its connection";
    else if (code <= 128) ended_ = str("exited with status ", code);
    else ended_ = str("was killed by signal ", code - 128, " (", strsignal(code - 128), ")");
  }
  return ended_;
}

}  // namespace bough
