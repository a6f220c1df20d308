// Environments in processes: a Python class, or a command of any kind that answers lines of JSON
// (environment_protocol.h). A process holds one conversation at a time and is used again for the next, so
// that what one of them does to itself is its own matter (environment_pool.h).
//
//   worker: {"ready": true}                                    or   {"ready": false, "error": "..."}
//
// is what a Python worker says first. A process that dies, closes its end, answers what is no reply or more
// than kMaxReplyBytes is killed with all that it started (worker_process.h), and its conversation fails with
// the reason.
#pragma once

#include <memory>
#include <string>

#include "env/environment.h"
#include "env/environment_pool.h"
#include "env/worker_process.h"
#include "env/worker_protocol.h"

namespace bough {

// A process that is spoken to in lines.
class LineProcess {
 public:
  explicit LineProcess(const std::vector<std::string>& arguments, bool in_namespace)
      : process_(arguments, in_namespace) {}

  int descriptor() const { return process_.descriptor(); }
  bool wants_to_send() const { return !outgoing_.empty(); }
  void send(const std::string& line) { outgoing_ += line + "\n"; }
  // Sends and receives what can be at once.
  void advance();
  std::optional<std::string> next() { return incoming_.next(); }
  // After the last line: why no more will come, as a reply kBroken.
  std::optional<ChannelReply> broken();

 private:
  WorkerProcess process_;
  LineSplitter incoming_;
  std::string outgoing_;
  bool is_open_ = true;
};

// Blocks until a first process is ready. UserError: it cannot be loaded or run.
std::unique_ptr<Environment> make_process_environment(const EnvironmentSettings& settings);

}  // namespace bough
