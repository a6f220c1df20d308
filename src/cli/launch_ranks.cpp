#include "cli/launch_ranks.h"

#include <cstdlib>
#include <sstream>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "cli/launcher.h"
#include "cli/tcp_store.h"

namespace bough {

void add_ranks_options(Command& command, RanksOptions& options) {
  command
      .add_option("--ranks", options.ranks,
                  "Processes that compute each step together, each on its shard of the batch")
      .type_name("N");
  command
      .add_option(
          "--launcher", options.launcher,
          "With --ranks, how they are started: mpirun; processes (by this command, without MPI); auto: "
          "mpirun if it is installed and this program was built with it")
      .type_name("NAME");
}

void add_max_restarts_option(Command& command, RanksOptions& options) {
  command
      .add_option("--max-restarts", options.max_restarts,
                  "With --ranks, how often all may restart from the last checkpoint after one has died")
      .type_name("N");
}

namespace {

constexpr int64_t kMostRanks = 1024;

// This rank's number among the ranks of this host, as the launcher counts them.
int64_t local_rank() {
  for (const char* name : {is_mpi_rank() ? "OMPI_COMM_WORLD_LOCAL_RANK" : "LOCAL_RANK", "SLURM_LOCALID"})
    if (const char* rank = std::getenv(name)) return std::atoll(rank);
  return 0;
}

void check(const RanksOptions& options) {
  if (options.ranks && (*options.ranks < 1 || *options.ranks > kMostRanks))
    throw UserError(str("--ranks: got ", *options.ranks, ", expected 1 to ", kMostRanks));
  if (options.max_restarts < 0 || (options.max_restarts > 0 && options.ranks.value_or(1) == 1))
    throw UserError(str("--max-restarts: got ", options.max_restarts,
                        options.max_restarts < 0
                            ? ", expected at least 0"
                            : " without several --ranks, which it restarts; a run of one process continues "
                              "if the same command is started again"));
  if (options.launcher != "auto" && options.launcher != "mpirun" && options.launcher != "processes")
    throw UserError(
        str("--launcher: got ", quoted(options.launcher), ", expected auto, mpirun or processes"));
  if (options.launcher != "auto" && !options.ranks)
    throw UserError(
        str("--launcher: got ", options.launcher, " without --ranks, which it starts; give --ranks, too"));
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
                        local_rank, " of this host; expected a GPU for each rank, or fewer ranks per host"));
  setenv(kName, listed[static_cast<size_t>(local_rank)].c_str(), 1);
}

std::unique_ptr<Communicator> enter_ranks(const RanksOptions& options, const std::string& device) {
  check(options);
  const std::optional<StoreEnvironment> by_store = is_mpi_rank() ? std::nullopt : store_environment();
  if (!is_mpi_rank() && !by_store) {
    if (options.ranks.value_or(1) == 1) return single_communicator();
    const bool by_mpirun =
        options.launcher == "auto" ? has_mpi_library() && is_on_path("mpirun") : options.launcher == "mpirun";
    launch_ranks(by_mpirun, *options.ranks, options.max_restarts);
  }
  if (device == "cuda") see_one_gpu(local_rank());  // before CUDA is initialized
  std::unique_ptr<Communicator> group = by_store ? store_communicator(*by_store) : mpi_communicator();
  if (options.ranks && group->size() != *options.ranks)
    throw UserError(str("--ranks: got ", *options.ranks, ", but ", group->size(),
                        " ranks were started; leave it out, or start as many"));
  return group;
}

std::string rank_prefix() {
  if (is_mpi_rank())
    for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK"})
      if (const char* rank = std::getenv(name)) return str("rank ", rank, ": ");
  const char* const rank = std::getenv("RANK");
  const char* const size = std::getenv("WORLD_SIZE");
  return rank && size && std::atoll(size) > 1 ? str("rank ", rank, ": ") : "";
}

}  // namespace bough
