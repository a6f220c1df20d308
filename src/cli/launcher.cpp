#include "cli/launcher.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <sstream>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/signals.h"
#include "cli/command.h"
#include "cli/tcp_store.h"

namespace bough {

namespace {

// How long ranks that are plain processes may go on after one of them has failed, to report their errors. If
// a rank was killed by a signal, the other ranks are killed without delay: they do not notice its end.
constexpr auto kAfterFailure = std::chrono::seconds(3);

std::vector<std::string> own_command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  std::vector<std::string> words;
  for (size_t at = 0; at < text.size(); at += words.back().size() + 1) words.emplace_back(text.c_str() + at);
  return words;
}

// Starts a process in its own process group, so that a terminal's Ctrl-C does not reach it. Otherwise mpirun
// would kill its ranks, and a rank could not write its checkpoint. `at_our_end`: the signal that the child
// gets if this process dies.
pid_t start(std::vector<std::string> words, int at_our_end) {
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  int failure[2];
  BOUGH_CHECK(pipe2(failure, O_CLOEXEC) == 0, "cannot create a pipe: ", std::strerror(errno));
  const pid_t child = fork();
  BOUGH_CHECK(child >= 0, "cannot start a process: ", std::strerror(errno));
  if (child == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, at_our_end);
    const int nothing = open("/dev/null", O_RDONLY);
    if (nothing >= 0) dup2(nothing, STDIN_FILENO);
    execvp(arguments[0], arguments.data());
    const int code = errno;
    (void)!write(failure[1], &code, sizeof code);
    _exit(127);
  }
  close(failure[1]);
  int code = 0;
  const bool failed = read(failure[0], &code, sizeof code) == sizeof code;
  close(failure[0]);
  if (!failed) return child;
  waitpid(child, nullptr, 0);
  throw UserError(str("--ranks: ", words[0], " cannot be started: ", std::strerror(code),
                      "; install Open MPI (openmpi-bin), use --launcher processes, or start the command with "
                      "your own mpirun or srun"));
}

int code_of(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Returns this process's exit code. The first child that fails determines it, and the other children are
// ended.
int wait_for(std::vector<pid_t> children, const StopFlag& stop) {
  int code = kExitDone;
  bool is_asked = false;
  std::optional<std::chrono::steady_clock::time_point> last;  // when the remaining children are killed
  const auto tell = [&](int signal) {
    for (const pid_t child : children) kill(child, signal);
  };
  while (!children.empty()) {
    std::erase_if(children, [&](pid_t child) {
      int status = 0;
      if (waitpid(child, &status, WNOHANG) == 0) return false;
      if (code == kExitDone && code_of(status) != kExitDone) {
        code = code_of(status);
        last = std::chrono::steady_clock::now();
        if (WIFEXITED(status)) *last += kAfterFailure;
      }
      return true;
    });
    if (last && std::chrono::steady_clock::now() >= *last) tell(SIGKILL);
    if (stop.requested() && !is_asked) {
      is_asked = true;
      tell(SIGUSR1);  // mpirun forwards it to its ranks
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  if (code == kExitDone || code == kExitBadInput || code == kExitInterrupted) return code;
  if (is_asked && code == 128 + SIGUSR1) return kExitInterrupted;  // the command does not catch SIGUSR1
  if (code > 128)
    print_line(str("a rank was ended by signal ", code - 128, " (", strsignal(code - 128),
                   "); all ranks were ended"));
  return kExitFailure;
}

int run_by_mpirun(const std::vector<std::string>& own, int64_t ranks, const StopFlag& stop) {
  // More ranks than cores are allowed, for experiments. A waiting rank yields its core to other ranks.
  std::vector<std::string> words = {"mpirun",
                                    "--quiet",
                                    "-n",
                                    std::to_string(ranks),
                                    "--oversubscribe",
                                    "--bind-to",
                                    "none",
                                    "--mca",
                                    "mpi_yield_when_idle",
                                    "1",
                                    "--mca",
                                    "btl_vader_single_copy_mechanism",
                                    "none"};
  if (geteuid() == 0) words.push_back("--allow-run-as-root");
  words.insert(words.end(), own.begin(), own.end());
  return wait_for({start(words, SIGTERM)}, stop);
}

int run_by_ourselves(const std::vector<std::string>& own, int64_t ranks, const StopFlag& stop) {
  const std::unique_ptr<HeldStore> store = hold_store();
  const auto set = [](const char* name, const std::string& value) { setenv(name, value.c_str(), 1); };
  set("WORLD_SIZE", std::to_string(ranks));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", std::to_string(store->port()));
  set("TORCHELASTIC_USE_AGENT_STORE", "True");
  std::vector<pid_t> children;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    set("RANK", std::to_string(rank));
    set("LOCAL_RANK", std::to_string(rank));
    children.push_back(start(own, SIGKILL));
  }
  unsetenv("RANK");  // this process is not a rank
  return wait_for(std::move(children), stop);
}

}  // namespace

bool is_on_path(const std::string& program) {
  const char* const path = std::getenv("PATH");
  std::istringstream folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (access(str(folder, "/", program).c_str(), X_OK) == 0) return true;
  return false;
}

void launch_ranks(bool by_mpirun, int64_t ranks, int64_t max_restarts) {
  char program[4096] = {};
  BOUGH_CHECK(readlink("/proc/self/exe", program, sizeof program - 1) > 0,
              "cannot read /proc/self/exe: ", std::strerror(errno));
  std::vector<std::string> own = own_command_line();
  own[0] = program;
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  const std::string threads = std::to_string(std::max<int64_t>(1, static_cast<int64_t>(cores) / ranks));
  setenv("OMP_NUM_THREADS", threads.c_str(), /*overwrite=*/0);
  const StopFlag stop;
  for (int64_t restart = 0;; ++restart) {
    const int code = by_mpirun ? run_by_mpirun(own, ranks, stop) : run_by_ourselves(own, ranks, stop);
    if (code != kExitFailure || restart == max_restarts || stop.requested()) _exit(code);
    print_line(str("restarting all ", ranks, " ranks from the last checkpoint: restart ", restart + 1, " of ",
                   max_restarts));
  }
}

}  // namespace bough
