// Child processes with a stream socket as their stdin and stdout: what rewards and environments run in.
//
// No process outlives its use, nor what it started, whatever either did: left the group, cleared the
// environment, ignored signals. A worker leads a process group of its own, so that Ctrl-C on the terminal
// reaches Bough alone (which then writes its checkpoint). What we start is not the program itself but what
// keeps it:
//
//   in a PID namespace   bubblewrap's first process of the namespace: when that ends, the kernel kills all
//                        processes in it. It ends with the thread of Bough that started it, however that went
//   without              a shell that all orphans below it come back to (PR_SET_CHILD_SUBREAPER). At the end
//                        of the program, or of that thread (PR_SET_PDEATHSIG), it kills its children until
//                        none is left
//
// A namespace holds against everything; the shell against all but a program that kills its keeper by intent
// and has left the group. Start workers from a thread that lives as long as they are needed.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bough {

// Whether the machine lets `bwrap` (on PATH) make PID namespaces. Takes the time of a small program.
bool can_make_pid_namespaces();

class WorkerProcess {
 public:
  // Starts arguments[0], which must be a path; in a namespace only where can_make_pid_namespaces(). IoError:
  // no process or socket to be had, or it cannot be executed.
  explicit WorkerProcess(const std::vector<std::string>& arguments, bool in_namespace = false);

  // Kills what the worker is and has started, and reaps the child, waiting at most two seconds for a process
  // that does not die.
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  int descriptor() const { return descriptor_; }  // for poll()

  // Neither blocks nor raises SIGPIPE. How many bytes went out; nullopt: the other side is closed.
  std::optional<size_t> send(std::string_view bytes);

  // Appends what is there. false: the other side is closed and everything has been read.
  bool receive(std::string& bytes);

  // Gives it `grace` to end by itself, then kills it and all that it started, and reaps it. How it ended, in
  // words: "exited with status 3", "was killed by signal 11 (Segmentation fault)"; "closed its
  // connection" if it was we who killed it.
  std::string end(std::chrono::milliseconds grace);

 private:
  bool wait_for_exit(std::chrono::milliseconds limit) const;  // does not reap

  const bool in_namespace_;
  pid_t pid_ = -1;  // of its keeper
  int descriptor_ = -1;
  std::string ended_;  // what end() said
};

// Appends what a socket that does not block has to give, at most a bounded part, so that who floods it does
// not keep us; the rest after the next poll. False: no more will come.
bool receive_what_is_there(int descriptor, std::string& bytes);

}  // namespace bough
