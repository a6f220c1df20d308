// A worker process that reads and writes lines.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "net/line_splitter.h"
#include "net/worker_process.h"

namespace bough {

class LineProcess {
 public:
  struct End {
    bool overflowed = false;  // its line exceeds kMaxReplyBytes; else its stream ended
    std::string how;          // "the worker exited with status 3"; empty if overflowed
  };

  explicit LineProcess(const std::vector<std::string>& arguments, bool in_namespace = false)
      : process_(arguments, in_namespace) {}

  int descriptor() const { return process_.descriptor(); }
  bool wants_to_send() const { return !outgoing_.empty(); }
  void send(const std::string& line) { outgoing_ += line + "\n"; }

  // Sends what can be sent at once. Returns the next line. Receives if no complete line was received before.
  std::optional<std::string> advance();
  // The next line that has been received already.
  std::optional<std::string> next() { return incoming_.next(); }
  // After the last line: why no more will come. nullopt: more may come.
  std::optional<End> end();

 private:
  WorkerProcess process_;
  LineSplitter incoming_;
  std::string outgoing_;
  bool is_open_ = true;
};

}  // namespace bough
