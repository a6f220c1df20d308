// Runs a function in a child process. For calls into libraries that may crash or hang, such as a broken
// driver.
#pragma once

#include <functional>
#include <string>

namespace bough {

struct ChildResult {
  bool is_done = false;  // the function returned
  bool timed_out = false;
  std::string output;   // what the function returned
  std::string failure;  // if not done: how the child ended, such as "ended by signal 11 (Segmentation fault)"
  std::string errors;   // the last 2 KiB of the child's stdout and stderr
};

// Forks and calls `work` in the child. After `seconds`, the child and the processes that it started are
// killed. This function then returns, even if the kernel cannot end the child yet (a driver that does not
// answer). An exception of `work` counts as a failure with its message. Call it before this process starts
// threads: the child has only the calling thread. Throws IoError if the system has no process or descriptor
// for it.
ChildResult run_in_child(const std::function<std::string()>& work, double seconds);

}  // namespace bough
