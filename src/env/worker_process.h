// A child process with a stream socket as its stdin and stdout: what reward workers run in.
//
// The child is the leader of its own process group, so that Ctrl-C on the terminal reaches Bough alone (which
// then writes its checkpoint) and what the child starts dies with it. It is killed when the *thread* that
// started it ends, however that happens (PR_SET_PDEATHSIG): start it from a thread that lives as long as it
// is needed.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bough {

class WorkerProcess {
 public:
  // Starts arguments[0], which must be a path. IoError: no process or socket to be had, or it cannot be
  // executed.
  explicit WorkerProcess(const std::vector<std::string>& arguments);

  // Kills the group and reaps the child, waiting at most two seconds for a process that does not die.
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  pid_t pid() const { return pid_; }
  int descriptor() const { return descriptor_; }  // for poll()

  // Neither blocks nor raises SIGPIPE. How many bytes went out; nullopt: the other side is closed.
  std::optional<size_t> send(std::string_view bytes);

  // Appends what is there. false: the other side is closed and everything has been read.
  bool receive(std::string& bytes);

  // Gives it `grace` to end by itself, then kills its group and reaps it. How it ended, in words: "exited
  // with status 3", "was killed by signal 11 (Segmentation fault)"; "closed its connection" if it was we who
  // killed it.
  std::string end(std::chrono::milliseconds grace);

 private:
  bool wait_for_exit(std::chrono::milliseconds limit) const;  // does not reap

  pid_t pid_ = -1;
  int descriptor_ = -1;
  std::string ended_;  // what end() said
};

}  // namespace bough
