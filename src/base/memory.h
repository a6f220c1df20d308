// Memory of the host that this process may still use, with the limits of its control groups (containers,
// Slurm jobs, systemd units). In a container, /proc/meminfo alone shows the memory of the whole machine.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace bough {

struct HostMemory {
  int64_t available = 0;   // bytes that can be allocated now without swapping or reaching a limit
  int64_t limit = 0;       // bytes that can ever be used: the machine's memory or the smallest limit
  std::string limited_by;  // the file with the bound of `available`: /proc/meminfo, or a group's limit
};

// Reads /proc/meminfo and the limits of this process's control group and of the groups above it: version 2
// (memory.max, memory.high) and version 1 (memory.limit_in_bytes, hierarchical_memory_limit). In a group with
// limit L, used bytes U and unused file cache C, L - (U - C) bytes are available: the kernel frees the cache
// first. Files that are missing or unreadable set no limit. Never throws. `root`: another root folder, for
// tests.
HostMemory host_memory(const std::filesystem::path& root = "/");

}  // namespace bough
