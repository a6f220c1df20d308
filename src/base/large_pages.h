// Asks the system for pages of 2 MiB for large arrays (transparent huge pages). With pages of 4 KiB, page
// faults take half of the time to build a large batch, and random reads miss the TLB. The system may ignore
// the request.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <vector>

namespace bough {

inline void ask_for_large_pages(void* memory, size_t num_bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kLargePage = uintptr_t{2} << 20;
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t begin = (address + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t end = (address + num_bytes) / kLargePage * kLargePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

template <class T>
void reserve_in_large_pages(std::vector<T>& column, int64_t count) {
  column.reserve(count);
  ask_for_large_pages(column.data(), column.capacity() * sizeof(T));
}

}  // namespace bough
