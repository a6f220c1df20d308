// Pinned host memory of the emulated device. While a copy of a stream may still read or write it, the pages
// are protected. An access of the host then ends in a signal handler, which asks host_order.h whether the
// host has waited for the copy.
#pragma once

#include <cstddef>
#include <mutex>

#include "lock.h"

namespace bough::emulation {

void* allocate_pinned_memory(size_t bytes);
void free_pinned_memory(void* data);
bool is_pinned_memory(const void* address);

// While this object exists, the calling thread may access the range in place of a stream. Afterwards the
// host may not write to it (a stream reads it), or not access it at all (a stream writes it).
class StreamsPinnedAccess {
 public:
  StreamsPinnedAccess(const void* begin, size_t bytes, bool is_write);
  ~StreamsPinnedAccess();
  StreamsPinnedAccess(const StreamsPinnedAccess&) = delete;
  StreamsPinnedAccess& operator=(const StreamsPinnedAccess&) = delete;

 private:
  const std::lock_guard<Lock> lock_;
  char* const begin_;
  const size_t bytes_;
  const bool is_write_;
};

}  // namespace bough::emulation
