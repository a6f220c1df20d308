// `--ranks N`: a command that several processes run together.
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
  std::string launcher = "auto";  // mpirun, processes; auto: mpirun where it and libbough_mpi.so are
  int64_t max_restarts = 0;
};

void add_ranks_options(Command& command, RanksOptions& options);
// Of commands that go on from a checkpoint.
void add_max_restarts_option(Command& command, RanksOptions& options);

// The group of this process: of the ranks that mpirun or srun started where it is one of them, of those that
// torchrun or a command like it did (tcp_store.h), else of itself. Where several ranks are asked for in a
// process that nobody started as one, so many copies of the same command are started on this machine, by
// mpirun or as plain processes, each with its share of the cores, and this process waits for them, starts
// them again where one died and max_restarts allows it, hands Ctrl-C, SIGTERM and SIGUSR1 on to them as
// SIGUSR1, and ends as they end: this does not return then. UserError: another number than was started, no
// mpirun.
// `device`: cuda: each rank sees one of its host's GPUs, as device 0. The group carries what the host has;
// nccl_communicator() makes one of it that carries what GPUs have.
std::unique_ptr<Communicator> enter_ranks(const RanksOptions& options, const std::string& device = "cpu");

// Of a process that is the local_rank-th of its host's: sets CUDA_VISIBLE_DEVICES to its GPU. Of several that
// are listed there the local_rank-th; a single one is the starter's choice, and stays. UserError: too few are
// listed.
void see_one_gpu(int64_t local_rank);

// "" of a single process, else what a rank's messages begin with: "rank 1: ".
std::string rank_prefix();

}  // namespace bough
