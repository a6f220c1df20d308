// `--ranks N`: several processes run one command together.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "cli/command.h"
#include "comm/communicator.h"

namespace bough {

struct RanksOptions {
  std::optional<int64_t> ranks;
  std::string launcher = "auto";  // mpirun, processes; auto: mpirun if it and libbough_mpi.so exist
  int64_t max_restarts = 0;
};

void add_ranks_options(Command& command, RanksOptions& options);
// --max-restarts, for commands that can continue from a checkpoint.
void add_max_restarts_option(Command& command, RanksOptions& options);

// Returns a communicator of all ranks of the command, to which this process belongs as one rank.
//   - Started by mpirun or srun: the MPI ranks.
//   - Started by torchrun or a similar launcher: the ranks of its store (tcp_store.h).
//   - Otherwise, with one rank or without --ranks: this process alone.
//   - Otherwise: does not return. launch_ranks() starts the ranks. This process forwards Ctrl-C, SIGTERM and
//     SIGUSR1 to them as SIGUSR1, and exits when they have ended.
// If `device` is cuda, each rank sees one of its host's GPUs, as device 0. The communicator takes host
// buffers only; nccl_communicator() turns it into one that takes GPU buffers. Throws UserError if --ranks
// differs from the number of started ranks, or if mpirun is missing.
std::unique_ptr<Communicator> enter_ranks(const RanksOptions& options, const std::string& device = "cpu");

// Sets CUDA_VISIBLE_DEVICES to the GPU of the local_rank-th process of this host: the local_rank-th GPU of
// the existing list, or GPU local_rank if the variable is unset. A list of one GPU is the launcher's choice
// and stays. Throws UserError if the list is too short. Call it before CUDA is initialized.
void see_one_gpu(int64_t local_rank);

// The beginning of a rank's messages, such as "rank 1: ". "" for a single process.
std::string rank_prefix();

}  // namespace bough
