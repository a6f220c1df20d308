// Runs a function or a program in a child process. For calls into libraries that may crash or hang, such as a
// broken driver.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/descriptor.h"

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

// A program that runs beside this process and reports by lines on its stdout. Unlike run_in_child(), it may
// be started by a process that has threads. The program dies with the thread that started it.
class ChildProgram {
 public:
  // command: the program's path, then its arguments. environment: variables that are added or replaced.
  // Throws IoError if the system has no process or descriptor for the program. A program that does not exist
  // ends with exit code 127.
  ChildProgram(const std::vector<std::string>& command,
               const std::vector<std::pair<std::string, std::string>>& environment);
  ~ChildProgram();  // like end()
  ChildProgram(const ChildProgram&) = delete;
  ChildProgram& operator=(const ChildProgram&) = delete;

  enum class Next { kLine, kEnd, kTimeout };
  // Waits at most `seconds` for the next line of stdout and sets *line, without the newline. kEnd: the
  // program has closed its stdout. Text behind the last newline is no line.
  Next next_line(double seconds, std::string* line);

  // If stdout is closed, waits a moment for the program's end. Then kills the program, if it still runs, and
  // the processes that it started. Returns how the program ended, such as "ended by signal 11 (Segmentation
  // fault)"; "" if by exit code 0.
  std::string end();
  std::string errors() const;  // the last 2 KiB of stderr

 private:
  pid_t child_ = -1;  // -1: end() was called
  Descriptor output_, errors_;
  std::string text_;  // read, but no line yet
  bool is_closed_ = false;
  std::string how_;  // how it ended
};

}  // namespace bough
