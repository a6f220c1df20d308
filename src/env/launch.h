// Starts a program in a child process with chosen descriptors, limits and user, and nothing else of this
// process.
#pragma once

#include <sys/resource.h>
#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/descriptor.h"

namespace bough {

// Throws IoError with errno's message: "sandbox: cannot make a WHAT: ...".
[[noreturn]] void no_descriptor(const char* what);

// A pipe that exec closes. Reading from it does not block.
struct Pipe {
  Descriptor read, write;
  Pipe();  // throws IoError
};

// An in-memory file that cannot be changed or extended, positioned at its beginning. Throws IoError.
Descriptor memory_file(std::string_view content);

// Returns an unused user id. Up to 1,024 concurrent sandboxes of a process get different ids. In a container
// that maps few users, the id is one of the last mapped ones, and sandboxes may share an id. nullopt: this
// process is not root, or the container maps only root.
std::optional<uid_t> spare_user();

// Everything that the child needs between fork and exec, prepared before fork. The child may make only system
// calls, because another thread may have held a lock at the fork.
struct Launch {
  std::vector<std::string> arguments;
  std::vector<char*> argv;
  std::vector<char*> environment;
  std::string home;              // in the environment: "HOME=..."
  std::vector<int> descriptors;  // these become 0, 1, 2, ...; -1: closed in the child
  std::optional<uid_t> user;
  std::string folder = "/";
  std::vector<std::pair<__rlimit_resource_t, rlim_t>> limits;
  int error_pipe = -1;
  pid_t parent = -1;
};

// Ends a child after fork. Makes the raw system call, because sanitizers intercept _exit, and fail if the
// parent's threads do not exist.
[[noreturn]] void end_child(int status);

// Executes the program in a child after fork. If that fails, errno is written to `error_pipe`.
[[noreturn]] void launch(const Launch& launch);

}  // namespace bough
