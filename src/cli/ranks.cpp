#include "cli/ranks.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <thread>
#include <vector>

#include "base/error.h"
#include "cli/command.h"

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

[[noreturn]] void become_mpirun(int64_t ranks) {
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
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  execvp("mpirun", arguments.data());
  throw UserError(str("--ranks ", ranks, ": mpirun cannot be started: ", std::strerror(errno),
                      "; install Open MPI (openmpi-bin), or start the command by your own mpirun or srun"));
}

}  // namespace

void add_ranks_option(CLI::App& command, std::optional<int64_t>& ranks) {
  command.add_option("--ranks", ranks, "Processes that take the step together, each its share of the batch")
      ->type_name("N");
}

std::unique_ptr<Communicator> enter_ranks(const std::optional<int64_t>& ranks) {
  if (ranks && (*ranks < 1 || *ranks > kMostRanks))
    throw UserError(str("--ranks: got ", *ranks, ", expected 1 to ", kMostRanks));
  if (!is_mpi_rank()) {
    if (ranks.value_or(1) > 1) become_mpirun(*ranks);
    return single_communicator();
  }
  std::unique_ptr<Communicator> group = mpi_communicator();
  if (ranks && group->size() != *ranks)
    throw UserError(str("--ranks: got ", *ranks, ", but ", group->size(),
                        " were started; leave it out, or start as many"));
  return group;
}

std::string rank_prefix() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK"})
    if (const char* rank = std::getenv(name)) return str("rank ", rank, ": ");
  return "";
}

}  // namespace bough
