// Starts the ranks of a command as processes on this machine, and waits for them.
#pragma once

#include <cstdint>
#include <string>

namespace bough {

// Returns whether a folder of PATH has an executable file of this name.
bool is_on_path(const std::string& program);

// Starts `ranks` copies of this process's command, each with its share of the cores (OMP_NUM_THREADS).
//   by_mpirun: mpirun starts them, and they connect through MPI.
//   otherwise: this process starts them, and they connect through a store that this process holds
//              (tcp_store.h). The environment tells each rank its number: RANK, WORLD_SIZE, LOCAL_RANK,
//              MASTER_ADDR, MASTER_PORT.
// If a rank dies, all ranks are ended, and started again at most max_restarts times. This process then exits
// with the ranks' exit code. Throws UserError if mpirun cannot be started.
[[noreturn]] void launch_ranks(bool by_mpirun, int64_t ranks, int64_t max_restarts);

}  // namespace bough
