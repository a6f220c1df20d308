#include "cli/ranks.h"

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
#include <sstream>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/signals.h"
#include "cli/command.h"
#include "kernels/common/cuda_library.h"

namespace bough {

namespace {

constexpr int64_t kMostRanks = 1024;

std::vector<std::string> own_command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  std::vector<std::string> words;
  for (size_t at = 0; at < text.size(); at += words.back().size() + 1) words.emplace_back(text.c_str() + at);
  return words;
}

// A process of its own group, so that a terminal's Ctrl-C does not reach it: mpirun would kill its ranks.
pid_t start(std::vector<std::string> words, int64_t ranks) {
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  int failure[2];
  BOUGH_CHECK(pipe2(failure, O_CLOEXEC) == 0, "a pipe: ", std::strerror(errno));
  const pid_t child = fork();
  BOUGH_CHECK(child >= 0, "a process: ", std::strerror(errno));
  if (child == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
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
  throw UserError(str("--ranks ", ranks, ": mpirun cannot be started: ", std::strerror(code),
                      "; install Open MPI (openmpi-bin), or start the command by your own mpirun or srun"));
}

// What this process ends with, as the child ended.
int wait_for(pid_t child, const StopFlag& stop) {
  int status = 0;
  bool is_asked = false;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (stop.requested() && !is_asked) {
      is_asked = true;
      kill(child, SIGUSR1);  // mpirun hands it on
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  if (code == kExitDone || code == kExitBadInput || code == kExitInterrupted) return code;
  if (is_asked && code == 128 + SIGUSR1) return kExitInterrupted;  // a command that does not catch it
  if (code > 128)
    print_line(
        str("a rank was ended by signal ", code - 128, " (", strsignal(code - 128), "), and with it all"));
  return kExitFailure;
}

// Ends this process as the last of the children ends.
[[noreturn]] void run_under_mpirun(int64_t ranks, int64_t max_restarts) {
  char program[4096] = {};
  BOUGH_CHECK(readlink("/proc/self/exe", program, sizeof program - 1) > 0,
              "who am I: ", std::strerror(errno));
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  const std::string threads = std::to_string(std::max<int64_t>(1, static_cast<int64_t>(cores) / ranks));
  setenv("OMP_NUM_THREADS", threads.c_str(), /*overwrite=*/0);
  // More ranks than cores are allowed, for trying things out; ranks that wait leave their core to others.
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
  words.push_back(program);
  std::vector<std::string> own = own_command_line();
  words.insert(words.end(), own.begin() + 1, own.end());
  const StopFlag stop;
  for (int64_t restart = 0;; ++restart) {
    const int code = wait_for(start(words, ranks), stop);
    if (code != kExitFailure || restart == max_restarts || stop.requested()) _exit(code);
    print_line(str("starting all ", ranks, " ranks again from the last checkpoint: restart ", restart + 1,
                   " of ", max_restarts));
  }
}

}  // namespace

void add_ranks_option(CLI::App& command, std::optional<int64_t>& ranks) {
  command.add_option("--ranks", ranks, "Processes that take each step together, each its share of the batch")
      ->type_name("N");
}

void add_max_restarts_option(CLI::App& command, int64_t& max_restarts) {
  command
      .add_option(
          "--max-restarts", max_restarts,
          "With --ranks: times that all are started again from the last checkpoint after one has died")
      ->type_name("N");
}

namespace {
// Among the ranks of this host, as its starter counts them.
int64_t local_rank() {
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "LOCAL_RANK"})
    if (const char* rank = std::getenv(name)) return std::atoll(rank);
  return 0;
}
}  // namespace

void see_one_gpu(int64_t local_rank) {
  constexpr const char* kName = "CUDA_VISIBLE_DEVICES";
  const char* const given = std::getenv(kName);
  if (!given) {
    setenv(kName, std::to_string(local_rank).c_str(), 1);
    return;
  }
  std::vector<std::string> listed;
  std::istringstream list(given);
  for (std::string gpu; std::getline(list, gpu, ',');) listed.push_back(gpu);
  if (listed.size() == 1) return;
  if (local_rank >= std::ssize(listed))
    throw UserError(str(kName, ": got ", quoted(std::string(given)), ", ", listed.size(), " GPUs, for rank ",
                        local_rank, " of this host; expected one for each rank, or fewer ranks a host"));
  setenv(kName, listed[static_cast<size_t>(local_rank)].c_str(), 1);
}

std::unique_ptr<Communicator> enter_ranks(const std::optional<int64_t>& ranks, int64_t max_restarts,
                                          const std::string& device) {
  if (ranks && (*ranks < 1 || *ranks > kMostRanks))
    throw UserError(str("--ranks: got ", *ranks, ", expected 1 to ", kMostRanks));
  if (max_restarts < 0 || (max_restarts > 0 && ranks.value_or(1) == 1))
    throw UserError(str("--max-restarts: got ", max_restarts,
                        max_restarts < 0
                            ? ", expected at least 0"
                            : " without several --ranks, which are what it starts again; a run of one "
                              "process goes on where it is started with the same command"));
  if (!is_mpi_rank()) {
    if (ranks.value_or(1) > 1) run_under_mpirun(*ranks, max_restarts);
    return single_communicator();
  }
  if (device == "cuda") see_one_gpu(local_rank());  // before CUDA is begun with
  std::unique_ptr<Communicator> group = mpi_communicator();
  if (ranks && group->size() != *ranks)
    throw UserError(str("--ranks: got ", *ranks, ", but ", group->size(),
                        " were started; leave it out, or start as many"));
  if (device != "cuda" || group->size() == 1) return group;
  open_cuda_library();
  if (auto by_nccl = nccl_communicator(group)) return by_nccl;
  log_warning("this build has no libbough_nccl.so: what the GPUs' ranks sum goes through the host's memory");
  return group;
}

std::string rank_prefix() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK"})
    if (const char* rank = std::getenv(name)) return str("rank ", rank, ": ");
  return "";
}

}  // namespace bough
