// Starts the ranks of a command on this machine, and waits for them.
#pragma once

#include <cstdint>
#include <string>

namespace bough {

// Whether a program of this name is in one of PATH's folders.
bool is_on_path(const std::string& program);

// So many copies of this process's own command, each with its share of the cores. by_mpirun: mpirun starts
// them, and they meet through MPI; else this process does, and they meet in a store that it holds
// (tcp_store.h): RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT tell each who it is. A rank that
// dies ends all. Ends this process as the last of them ends. UserError: no mpirun.
[[noreturn]] void launch_ranks(bool by_mpirun, int64_t ranks, int64_t max_restarts);

}  // namespace bough
