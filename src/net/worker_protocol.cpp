#include "net/worker_protocol.h"

namespace bough {

namespace {

constexpr size_t kMaxMessage = 1000;

}  // namespace

std::string shortened(std::string_view text) {
  if (text.size() <= kMaxMessage) return std::string(text);
  size_t end = kMaxMessage;
  // do not cut inside a UTF-8 character
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return std::string(text.substr(0, end)) + "…";
}

}  // namespace bough
