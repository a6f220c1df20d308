#include "net/line_splitter.h"

namespace bough {

void LineSplitter::append(std::string_view bytes) {
  if (!overflowed_) pending_ += bytes;
}

std::optional<std::string> LineSplitter::next() {
  const size_t end = pending_.find('\n', searched_);
  if (end == std::string::npos ? pending_.size() > max_bytes_ : end > max_bytes_) overflowed_ = true;
  if (overflowed_) pending_ = {};
  if (overflowed_ || end == std::string::npos) {
    searched_ = pending_.size();
    return std::nullopt;
  }
  std::string line = pending_.substr(0, end);
  pending_.erase(0, end + 1);
  searched_ = 0;
  return line;
}

}  // namespace bough
