// Allocates blocks from one address range, first fit by ascending address. This keeps the live blocks
// together and the used extent short. Freed parts merge with their neighbors and keep their pages. Resident
// memory is at most the largest extent since the last discard(). Uses huge pages if the system lets programs
// ask for them. Not thread-safe.
#pragma once

#include <cstddef>
#include <map>

namespace bough {

class Arena {
 public:
  static constexpr size_t kAlignment = 64;  // of blocks, in bytes: a cache line, and the widest vector

  // Reserves addresses but no memory. If the system does not grant `bytes`, reserves fewer, possibly none.
  explicit Arena(size_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Returns an uninitialized block. nullptr if no addresses are left or the system refuses memory. `bytes`
  // must be above 0.
  void* take(size_t bytes);
  // Frees a block. `bytes` must be the number passed to take().
  void give_back(void* block, size_t bytes);
  bool contains(const void* address) const { return address >= base_ && address < base_ + reserved_; }
  // Returns pages without blocks to the system.
  void discard();

  // Bytes from the first address to the end of the last block: current, and peak since the last discard().
  size_t extent() const { return end_; }
  size_t peak_extent() const { return peak_end_; }
  void check_integrity() const;

 private:
  bool extend(size_t end);

  char* base_ = nullptr;
  size_t reserved_ = 0;
  size_t usable_ = 0;  // bytes from base_ on that are readable and writable
  size_t end_ = 0, peak_end_ = 0;
  std::map<size_t, size_t> free_;  // offset -> bytes of free parts; no two are adjacent, none reaches end_
};

}  // namespace bough
