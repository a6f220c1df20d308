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
    bool overflowed = false;  // true: a line exceeds kMaxReplyBytes; false: the stream ended
    std::string how;          // "the worker exited with status 3"; empty if overflowed
  };

  explicit LineProcess(const std::vector<std::string>& arguments, bool in_namespace = false)
      : process_(arguments, in_namespace) {}

  int descriptor() const { return process_.descriptor(); }
  bool wants_to_send() const { return !outgoing_.empty(); }
  void send(const std::string& line) { outgoing_ += line + "\n"; }

  // Sends without blocking and returns the next line. If no complete line has been received yet, first
  // receives without blocking. nullopt if there is still no complete line.
  std::optional<std::string> advance();
  // Returns the next line that has already been received; nullopt if there is none.
  std::optional<std::string> next() { return incoming_.next(); }
  // Returns why no more lines will come; nullopt if more may come. Call it only when advance() or next() has
  // just returned nullopt: end() ignores lines that were received and not yet returned.
  std::optional<End> end();

 private:
  WorkerProcess process_;
  LineSplitter incoming_;
  std::string outgoing_;
  bool is_open_ = true;
};

}  // namespace bough
