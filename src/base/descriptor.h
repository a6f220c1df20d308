// A file descriptor that closes itself.
#pragma once

#include <unistd.h>

#include <utility>

namespace bough {

// An open descriptor, or -1.
struct Descriptor {
  int value = -1;
  Descriptor() = default;
  explicit Descriptor(int v) : value(v) {}
  Descriptor(Descriptor&& other) noexcept : value(std::exchange(other.value, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(value, other.value);
    return *this;
  }
  ~Descriptor() { reset(); }
  void reset() {  // closes it
    if (value >= 0) ::close(value);
    value = -1;
  }
};

}  // namespace bough
