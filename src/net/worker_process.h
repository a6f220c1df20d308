// Child processes with a stream socket as their stdin and stdout. Rewards and environments run in them.
//
// A worker does not outlive its WorkerProcess. Neither does any process that the worker started, even if it
// left the process group, cleared its environment or ignores signals. A worker leads a process group of its
// own, so Ctrl-C on the terminal reaches only Bough (which then writes its checkpoint). Bough starts a
// keeper, which starts the program. The keeper is
//
//   in a PID namespace   bubblewrap's first process of the namespace. When it ends, the kernel kills all
//                        processes in the namespace. It ends with the thread of Bough that started it
//   without              a shell that becomes the parent of all orphans below it (PR_SET_CHILD_SUBREAPER).
//                        When the program or that thread of Bough ends (PR_SET_PDEATHSIG), the shell kills
//                        its children until none is left
//
// No process escapes from a namespace. Without a namespace, a program escapes only if it leaves the process
// group and kills the shell on purpose. Start workers from a thread that lives as long as the workers are
// needed.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bough {

// Whether `bwrap` (on PATH) can make PID namespaces on this machine. Runs a small program to find out.
bool can_make_pid_namespaces();

class WorkerProcess {
 public:
  // Starts arguments[0], which must be a path. `in_namespace` needs can_make_pid_namespaces(). Throws IoError
  // if the program cannot be executed, or if the system cannot create a process or socket for it.
  explicit WorkerProcess(const std::vector<std::string>& arguments, bool in_namespace = false);

  // Kills the worker and all processes that it started, and reaps the worker. If a process does not die,
  // waits for it a few seconds at most.
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  int descriptor() const { return descriptor_; }  // for poll()

  // Returns how many bytes were sent; nullopt if the worker has closed. Does not block or raise SIGPIPE.
  std::optional<size_t> send(std::string_view bytes);

  // Appends the received bytes, without blocking. Returns false if the worker has closed and all is read.
  bool receive(std::string& bytes);

  // Waits up to `grace` for the worker to end, then kills the worker and all processes that it started, and
  // reaps the worker. Returns how the worker ended: "exited with status 3", "was killed by signal 11
  // (Segmentation fault)", or "closed its connection" if end() had to kill it.
  std::string end(std::chrono::milliseconds grace);

 private:
  bool wait_for_exit(std::chrono::milliseconds limit) const;  // does not reap

  const bool in_namespace_;
  pid_t pid_ = -1;  // process id of the keeper
  int descriptor_ = -1;
  std::string ended_;  // the result of end()
};

// Appends the received bytes of a non-blocking socket. Reads a bounded number of bytes per call, so that a
// sender that never stops does not block the caller. Returns false if no more bytes will come.
bool receive_what_is_there(int descriptor, std::string& bytes);

}  // namespace bough
