// Observes and kills the processes of a program that was started in a child process.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

namespace bough {

// Start time of a process, in clock ticks since boot. Together with the process id it identifies a process
// uniquely. nullopt: the process has ended, or is a zombie that its parent has not reaped.
std::optional<uint64_t> start_time(pid_t pid);

// `pid` and all its descendants. A process that starts during the search may be missed, but no other process
// is returned in its place.
std::vector<pid_t> process_tree(pid_t pid);

int64_t resident_bytes(pid_t pid);  // memory that it shares with no other process

bool ended(pid_t pid);  // `pid` is a child; does not reap it, so that the process id stays taken

// Kills a child and its descendants, and waits until they have ended, for at most `limit` each. Does not reap
// the child.
void kill_tree(pid_t pid, std::chrono::milliseconds limit);

// Kills every process of a user that only this sandbox uses.
void kill_user(uid_t user);

}  // namespace bough
