// Runs an untrusted program and says how it ended.
//
// bubblewrap (`bwrap`) makes the sandbox. A program in it:
// - has its own namespaces for users, processes, network, IPC and host name;
// - sees /usr read-only, a /proc of its own processes and the harmless devices;
// - has two small file systems in memory: /tmp, its working folder, and /dev/shm;
// - gets four environment variables and cannot regain privileges;
// - does not see the run's folder, home folders, other processes or any network.
//
//   wall time      Bough kills the sandbox              processes   RLIMIT_NPROC, set inside the sandbox
//   CPU time       RLIMIT_CPU per process               files       RLIMIT_NOFILE, RLIMIT_FSIZE
//   memory         RLIMIT_AS per process; Bough checks  disk        the size of /tmp
//                  the sum of all processes             output      Bough kills the sandbox at the limit
//
// RLIMIT_NPROC does not limit processes of the host's user 0. If Bough runs as root, each sandbox therefore
// runs as a different, unused user id. The kernel's process count of that user covers this sandbox only, and
// no file or process of the host belongs to that user.
//
// No process outlives run(). The first process of the sandbox is killed with its namespace, even if Bough or
// the thread that called run() is killed (bwrap's --die-with-parent).
//
// If no sandbox can be made, the constructor throws. With `allow_unsandboxed`, programs then run with the
// limits only, in an empty folder. They have the network and can read all that their user can read. If Bough
// runs as root, the programs run as an unused user. If not, a program that leaves its process group may
// survive run().
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
      "if no sandbox can be made (no user namespaces), run programs with the limits only");
    v("bubblewrap", bubblewrap, "path of the program bwrap; empty: the one on PATH");
    v("read_only_paths", read_only_paths,
      "folders besides /usr that programs may read, such as an interpreter's");
    v("memory", memory, "maximum memory of all processes of one program together; auto: 1GiB");
    v("address_space", address_space, "maximum address space of each process; auto: the same as memory");
    v("disk", disk, "size of the program's /tmp, which is in memory; auto: 64MiB");
    v("output", output, "maximum output of a program; auto: 8MiB");
    v("processes", processes, "maximum processes and threads of one program, including two of the sandbox",
      range(4, 4096));
    v("open_files", open_files, "maximum open files of each process", range(32, 65536));
  }
};

struct SandboxProgram {
  std::vector<std::string> command;                          // first word: looked up on the sandbox's PATH
  std::vector<std::pair<std::string, std::string>> files{};  // name and content, in the working folder
  std::string_view input{};                                  // the program's stdin
  int channel = -1;     // a descriptor that the program gets as number 3; -1: none
  double seconds = 10;  // limit of wall time
};

struct SandboxResult {
  enum class End {
    kExited,      // `status` is its exit status; 128 + n: ended by signal n
    kTimedOut,    // it was killed at its deadline
    kMemory,      // its processes held more than `memory`
    kProcesses,   // more than `processes` were counted; RLIMIT_NPROC does not apply in every setup
    kOutput,      // it printed more than `output`
    kStopped,     // the stop token was set
    kNotStarted,  // the machine could make no sandbox or process; `errors` says why
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
  // Makes a sandbox once to test that it works. Throws UserError if there is no bwrap or no user namespaces,
  // unless allow_unsandboxed is set. The message says how to get them.
  explicit Sandbox(const SandboxSettings& settings);

  // Blocks until the program and all its processes have ended. Thread-safe. Throws IoError if the system has
  // no descriptor or memory for it.
  SandboxResult run(const SandboxProgram& program, std::stop_token stop = {}) const;

  bool sandboxed() const { return sandboxed_; }
  const std::string& why_not() const { return why_not_; }  // why no sandbox can be made; "" if sandboxed()

 private:
  std::vector<std::string> box_arguments() const;

  SandboxSettings settings_;
  std::string bwrap_;
  bool sandboxed_ = false;
  bool disable_user_namespaces_ = true;  // --disable-userns, unknown to bwrap before 0.8
  std::string why_not_;
};

}  // namespace bough
