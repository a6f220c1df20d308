// Cuts a stream of bytes into lines.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace bough {

// Limit for a line, and for an answer of an endpoint. A sender that exceeds the limit is treated as broken.
inline constexpr size_t kMaxReplyBytes = 1 << 20;

// If a line is longer than max_bytes, overflowed() becomes true and stays true.
class LineSplitter {
 public:
  explicit LineSplitter(size_t max_bytes = kMaxReplyBytes) : max_bytes_(max_bytes) {}
  void append(std::string_view bytes);
  std::optional<std::string> next();  // without its line break
  bool overflowed() const { return overflowed_; }

 private:
  size_t max_bytes_;
  std::string pending_;
  size_t searched_ = 0;  // no line break before this offset
  bool overflowed_ = false;
};

}  // namespace bough
