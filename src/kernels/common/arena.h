// One range of addresses that blocks are cut from: the first free part that is large enough, lowest address
// first, so that what lives stays together and the range short. Freed parts merge with their neighbours and
// keep their pages: what is resident is at most the extent the blocks ever had since the last discard(). The
// pages are large ones where the system leaves that to programs. Not safe for threads by itself.
#pragma once

#include <cstddef>
#include <map>

namespace bough {

class Arena {
 public:
  static constexpr size_t kAlignment = 64;  // of blocks: a cache line, and the widest vector

  // Reserves addresses, no memory: as many bytes as the system grants of those asked for, perhaps none.
  explicit Arena(size_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Returns an uninitialised block; null where no addresses are left or the system refuses memory. bytes > 0.
  void* take(size_t bytes);
  // Frees a block; `bytes` are those it was asked for with.
  void give_back(void* block, size_t bytes);
  bool contains(const void* address) const { return address >= base_ && address < base_ + reserved_; }
  // Gives pages that no block touches back to the system.
  void discard();

  // Bytes from the first address to the last block's end, now and at most since the last discard().
  size_t extent() const { return end_; }
  size_t peak_extent() const { return peak_end_; }
  void check_integrity() const;

 private:
  bool extend(size_t end);

  char* base_ = nullptr;
  size_t reserved_ = 0;
  size_t usable_ = 0;  // readable and writable from base_ on
  size_t end_ = 0, peak_end_ = 0;
  std::map<size_t, size_t> free_;  // start, bytes; no two touch, none reaches end_
};

}  // namespace bough
