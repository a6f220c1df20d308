// Cuts a stream of bytes into lines.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace bough {

// Limit for a line, and for an answer of an endpoint. A sender that exceeds the limit is treated as broken.
inline constexpr size_t kMaxReplyBytes = 1 << 20;

// If a line is longer than kMaxReplyBytes, overflowed() becomes true and stays true.
class LineSplitter {
 public:
  void append(std::string_view bytes);
  std::optional<std::string> next();  // without its line break
  bool overflowed() const { return overflowed_; }

 private:
  std::string pending_;
  size_t searched_ = 0;  // no line break before this offset
  bool overflowed_ = false;
};

}  // namespace bough
