#include "net/line_process.h"

#include <chrono>

namespace bough {

namespace {

// After a worker has closed its socket, it has this time to exit. If it has not exited by then, the report
// says that it only closed its connection.
constexpr std::chrono::milliseconds kExitGrace{200};

}  // namespace

std::optional<std::string> LineProcess::advance() {
  if (!outgoing_.empty()) {
    const auto sent = process_.send(outgoing_);
    if (sent) outgoing_.erase(0, *sent);
    else outgoing_.clear();  // the process has ended; end() reports how
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
