#include "kernels/common/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

#include "base/error.h"
#include "base/large_pages.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif

namespace bough {

namespace {
constexpr size_t kLargePage = size_t{2} << 20;
constexpr size_t kLeastReserved = size_t{64} << 20;
constexpr size_t kStep = size_t{64} << 20;  // usable_ grows by this; pages take no memory until written

size_t round_up(size_t bytes, size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}
size_t block_bytes(size_t bytes) {
  return round_up(bytes, Arena::kAlignment);
}
}  // namespace

Arena::Arena(size_t bytes) {
  const size_t wanted = round_up(bytes, kLargePage);
  for (size_t asked = wanted; asked >= std::min(wanted, kLeastReserved); asked /= 2) {
    void* memory =
        mmap(nullptr, asked + kLargePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) continue;
    const auto address = reinterpret_cast<uintptr_t>(memory);
    const size_t before = round_up(address, kLargePage) - address;
    base_ = static_cast<char*>(memory) + before;
    // If the address space is limited (ulimit -v), the arena keeps half of the addresses that it got, because
    // other code needs addresses, too.
    reserved_ = asked == wanted ? asked : asked / 2 / kLargePage * kLargePage;
    if (before > 0) munmap(memory, before);
    munmap(base_ + reserved_, asked + kLargePage - before - reserved_);
    return;
  }
}

Arena::~Arena() {
  if (!base_) return;
  ASAN_UNPOISON_MEMORY_REGION(base_, usable_);
  munmap(base_, reserved_);
}

void* Arena::take(size_t bytes) {
  if (bytes > reserved_) return nullptr;
  bytes = block_bytes(bytes);
  const auto found =
      std::find_if(free_.begin(), free_.end(), [&](const auto& part) { return part.second >= bytes; });
  size_t start = end_;
  if (found != free_.end()) {
    const auto [first, available] = *found;
    start = first;
    const auto next = free_.erase(found);
    if (available > bytes) free_.emplace_hint(next, start + bytes, available - bytes);
  } else {
    if (!extend(end_ + bytes)) return nullptr;
    end_ += bytes;
    peak_end_ = std::max(peak_end_, end_);
  }
  ASAN_UNPOISON_MEMORY_REGION(base_ + start, bytes);
  return base_ + start;
}

bool Arena::extend(size_t end) {
  if (end > reserved_) return false;
  if (end <= usable_) return true;
  const size_t usable = std::min(round_up(end, kStep), reserved_);
  if (mprotect(base_ + usable_, usable - usable_, PROT_READ | PROT_WRITE) != 0) return false;
  ask_for_large_pages(base_ + usable_, usable - usable_);
  ASAN_POISON_MEMORY_REGION(base_ + usable_, usable - usable_);
  usable_ = usable;
  return true;
}

void Arena::give_back(void* block, size_t bytes) {
  size_t start = static_cast<size_t>(static_cast<char*>(block) - base_);
  bytes = block_bytes(bytes);
  ASAN_POISON_MEMORY_REGION(base_ + start, bytes);
  auto next = free_.lower_bound(start);
  if (next != free_.end() && start + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == start) {
      start = previous->first;
      bytes += previous->second;
      free_.erase(previous);
    }
  }
  if (start + bytes == end_) end_ = start;
  else free_[start] = bytes;
}

void Arena::discard() {
  const auto discard_part = [&](size_t begin, size_t end) {
    constexpr size_t kPage = 4096;
    begin = round_up(begin, kPage);
    end = end / kPage * kPage;
    if (begin < end) madvise(base_ + begin, end - begin, MADV_DONTNEED);
  };
  for (const auto& [start, bytes] : free_) discard_part(start, start + bytes);
  discard_part(end_, usable_);
  peak_end_ = end_;
}

void Arena::check_integrity() const {
  BOUGH_CHECK(end_ <= peak_end_ && peak_end_ <= usable_ && usable_ <= reserved_, "arena: end ", end_,
              ", peak ", peak_end_, ", usable ", usable_, ", reserved ", reserved_);
  size_t last = 0;
  bool first = true;
  for (const auto& [start, bytes] : free_) {
    BOUGH_CHECK(bytes > 0 && start % kAlignment == 0 && bytes % kAlignment == 0, "arena: free part at ",
                start, " of ", bytes);
    BOUGH_CHECK(first || start > last, "arena: free part at ", start, " touches one that ends at ", last);
    BOUGH_CHECK(start + bytes < end_, "arena: free part at ", start, " of ", bytes, " reaches the end, ",
                end_);
    last = start + bytes;
    first = false;
  }
}

}  // namespace bough
