#include "net/line_process.h"

#include <chrono>

namespace bough {

namespace {

// A worker that closed its socket may take this long to exit. After that it is reported as one that only
// closed its connection.
constexpr std::chrono::milliseconds kExitGrace{200};

}  // namespace

std::optional<std::string> LineProcess::advance() {
  if (!outgoing_.empty()) {
    const auto sent = process_.send(outgoing_);
    if (sent) outgoing_.erase(0, *sent);
    else outgoing_.clear();  // the end of the process's output, read below, says how it ended
  }
  if (auto line = incoming_.next()) return line;
  std::string bytes;
  if (is_open_) is_open_ = process_.receive(bytes);
  incoming_.append(bytes);
  return incoming_.next();
}

std::optional<LineProcess::End> LineProcess::end() {
  if (incoming_.overflowed()) return End{.overflowed = true};
  if (is_open_) return std::nullopt;
  return End{.how = "the worker " + process_.end(kExitGrace)};
}

}  // namespace bough
