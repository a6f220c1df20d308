// Runs a program that nobody has read, and says how it ended.
//
// The box is made by bubblewrap (`bwrap`): namespaces of its own for users, processes, network, IPC and host
// name; a root that holds /usr read-only, a /proc of its own processes, the harmless devices, and two small
// file systems in memory (/tmp, where the program runs, and /dev/shm); an environment of four variables; no
// privileges to be had back. It does not see the run's folder, home, other processes or any network.
//
//   wall time      we kill the box                      processes   RLIMIT_NPROC, set inside the box
//   CPU time       RLIMIT_CPU, of each process          files       RLIMIT_NOFILE, RLIMIT_FSIZE
//   memory         RLIMIT_AS of each process; what all  disk        the size of /tmp
//                  hold together is watched             output      we read so much, then kill the box
//
// RLIMIT_NPROC binds no process of the host's user 0, whatever its number inside the box. So where Bough runs
// as root the box runs as a user that nobody has, another one for each box: its number is the host's process
// count of that box alone, and no file or process of the host belongs to it.
//
// Nothing outlives run(): the first process of the box is killed with all in its namespace, also when Bough
// itself, or the thread that called run(), is killed (bwrap's --die-with-parent).
//
// Where no box can be made, the constructor refuses; `allow_unsandboxed` runs programs without one: with
// the limits, as another user where Bough is root, in an empty folder, but with the network, and with what
// that user can read. Without root a program that leaves its process group may then survive.
#pragma once

#include <cstdint>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/settings.h"

namespace bough {

struct SandboxSettings {
  bool allow_unsandboxed = false;
  std::string bubblewrap;
  std::vector<std::string> read_only_paths;
  Bytes memory{int64_t{1} << 30};
  Bytes address_space;
  Bytes disk{int64_t{64} << 20};
  Bytes output{int64_t{8} << 20};
  int64_t processes = 32;
  int64_t open_files = 128;

  template <class V>
  void visit(V& v) {
    v("allow_unsandboxed", allow_unsandboxed,
      "run programs without a sandbox where none can be made (no user namespaces): limits only");
    v("bubblewrap", bubblewrap, "the program bwrap; empty: the one on PATH");
    v("read_only_paths", read_only_paths, "folders beside /usr that programs may read, as an interpreter's");
    v("memory", memory, "what the processes of one program may hold together; auto: 1GiB");
    v("address_space", address_space, "address space of each process; auto: as much as memory");
    v("disk", disk, "size of the program's /tmp, which is in memory; auto: 64MiB");
    v("output", output, "what a program may print; auto: 8MiB");
    v("processes", processes, "processes and threads of one program, with two of the sandbox",
      range(4, 4096));
    v("open_files", open_files, "open files of each process", range(32, 65536));
  }
};

struct SandboxProgram {
  std::vector<std::string> command;                          // its first word is looked for on the box's PATH
  std::vector<std::pair<std::string, std::string>> files{};  // name and content, in the working folder
  std::string_view input{};                                  // its stdin, then end of file
  int channel = -1;     // a descriptor that the program has as number 3; -1: none
  double seconds = 10;  // wall time
};

struct SandboxResult {
  enum class End {
    kExited,      // `status` is its exit status; 128 + n: ended by signal n
    kTimedOut,    // it was killed at its deadline
    kMemory,      // its processes held more than `memory`
    kProcesses,   // more than `processes`, where RLIMIT_NPROC did not hold
    kOutput,      // it printed more than `output`
    kStopped,     // the stop token
    kNotStarted,  // no box, or no process: nobody's fault but the machine's; `errors` says why
  };
  End end = End::kNotStarted;
  int status = 0;
  std::string output;  // stdout; not necessarily UTF-8
  std::string errors;  // the last 4 KiB of stderr
  double seconds = 0;

  bool ok() const { return end == End::kExited && status == 0; }
  std::string describe() const;  // "ended with status 1: ZeroDivisionError: division by zero"
};

class Sandbox {
 public:
  // Makes a box once to see that it can. UserError: no bwrap or no user namespaces, and not allowed to do
  // without; says how to get them.
  explicit Sandbox(const SandboxSettings& settings);

  // Blocks until the program and all it started are gone; from any number of threads. IoError: no descriptor
  // or memory for it.
  SandboxResult run(const SandboxProgram& program, std::stop_token stop = {}) const;

  bool sandboxed() const { return sandboxed_; }
  const std::string& why_not() const { return why_not_; }  // what refused a box; "" where sandboxed()

 private:
  std::vector<std::string> box_arguments() const;

  SandboxSettings settings_;
  std::string bwrap_;
  bool sandboxed_ = false;
  bool disable_user_namespaces_ = true;  // bwrap before 0.8 does not know the option
  std::string why_not_;
};

}  // namespace bough
