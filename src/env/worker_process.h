// Child processes with a stream socket as their stdin and stdout: what reward workers run in.
//
// No process outlives its use. A worker is the leader of its own process group, so that Ctrl-C on the
// terminal reaches Bough alone (which then writes its checkpoint); the group is killed when the worker ends.
// What left the group (setsid) is found by a variable of the environment that it inherited,
// BOUGH_REWARD_WORKER, and killed, too. Where Bough itself is killed, the kernel kills the worker
// (PR_SET_PDEATHSIG: when the *thread* that started it ends; start it from one that lives as long as it is
// needed), and a guard, a shell that waits for the end of our side of its socket, what the worker started.
// What cleared its environment and left the group is the one thing that stays.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bough {

struct WorkerProcessOptions {
  std::string marker;            // value of BOUGH_REWARD_WORKER, one of a kind; empty: not set
  bool outlives_thread = false;  // not killed with the thread that started it
};

class WorkerProcess {
 public:
  // Starts arguments[0], which must be a path. IoError: no process or socket to be had, or it cannot be
  // executed.
  explicit WorkerProcess(const std::vector<std::string>& arguments, const WorkerProcessOptions& options = {});

  // Kills what the worker is and has started, and reaps the child, waiting at most two seconds for a process
  // that does not die.
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  pid_t pid() const { return pid_; }
  int descriptor() const { return descriptor_; }  // for poll()

  // Neither blocks nor raises SIGPIPE. How many bytes went out; nullopt: the other side is closed.
  std::optional<size_t> send(std::string_view bytes);

  // Appends what is there. false: the other side is closed and everything has been read.
  bool receive(std::string& bytes);

  // Gives it `grace` to end by itself, then kills it, its group and what bears its marker, and reaps it. How
  // it ended, in words: "exited with status 3", "was killed by signal 11 (Segmentation fault)"; "closed its
  // connection" if it was we who killed it.
  std::string end(std::chrono::milliseconds grace);

 private:
  bool wait_for_exit(std::chrono::milliseconds limit) const;  // does not reap

  const std::string marker_;
  pid_t pid_ = -1;
  int descriptor_ = -1;
  std::string ended_;  // what end() said
};

// Workers that are started and guarded together.
class WorkerFamily {
 public:
  WorkerFamily();  // starts the guard; IoError: no process to be had

  // Not from several threads at once.
  std::unique_ptr<WorkerProcess> start(const std::vector<std::string>& arguments);

 private:
  const std::string name_;
  int64_t num_started_ = 0;
  WorkerProcess guard_;
};

}  // namespace bough
