#include "kernels/common/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <malloc.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

namespace bough {

namespace {
constexpr size_t kAlignment = 64;       // a cache line, and the widest vector
constexpr size_t kHeader = 64;          // before each block; keeps the alignment
constexpr size_t kSmallest = 64 << 10;  // below it malloc does not map pages anew
constexpr int kClassesPerDoubling = 8;
constexpr size_t kLargerClasses = 5;  // a request takes a kept block of up to so many classes above its own
// Live blocks at their peak, and a part of it more, bound what stays mapped.
constexpr int64_t kKeptPart = 3;
// Bytes from which malloc maps each block by itself, and unmaps it when it is freed.
constexpr int kMapped = 1 << 20;

struct Header {
  size_t asked;
  size_t capacity;
  uint64_t kept_since;  // a count of blocks given back
};

// Smallest class of at least `bytes`: (8 + i) / 8 of a power of two.
size_t class_capacity(size_t bytes) {
  if (bytes < kSmallest) return bytes;
  const size_t step = std::bit_floor(bytes) / kClassesPerDoubling;
  return (bytes + step - 1) / step * step;
}

size_t class_index(size_t capacity) {
  const size_t doubling = std::bit_width(capacity) - 1;
  return doubling * kClassesPerDoubling +
         (capacity - std::bit_floor(capacity)) / (std::bit_floor(capacity) / kClassesPerDoubling);
}

class KeepingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes == 0 ? nullptr : take(bytes);
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* target, const void* source, size_t count) const override {
    std::memcpy(target, source, count);
  }

  int64_t allocated() {
    std::lock_guard lock(mutex_);
    return allocated_;
  }
  int64_t peak() {
    std::lock_guard lock(mutex_);
    return peak_;
  }
  void reset_peak() {
    std::lock_guard lock(mutex_);
    peak_ = allocated_;
  }
  void release() {
    std::lock_guard lock(mutex_);
    for (auto& list : kept_) {
      for (Header* header : list) std::free(header);
      list.clear();
    }
    kept_bytes_ = 0;
  }

  static KeepingAllocator& instance() {
    // Tensors of static duration are freed after main: never destroyed.
    static auto* allocator = new KeepingAllocator;
    return *allocator;
  }

 private:
  void* take(size_t bytes) {
    const size_t capacity = class_capacity(bytes);
    Header* header = nullptr;
    {
      std::lock_guard lock(mutex_);
      allocated_ += static_cast<int64_t>(bytes);
      peak_ = std::max(peak_, allocated_);
      if (capacity >= kSmallest) {
        header = take_kept(class_index(capacity));
        live_bytes_ += static_cast<int64_t>(header ? header->capacity : capacity);
        live_peak_ = std::max(live_peak_, live_bytes_);
        if (!header) drop_oldest();
      }
    }
    if (!header) {
      void* memory = nullptr;
      if (posix_memalign(&memory, kAlignment, kHeader + capacity) != 0) {
        release();
        if (posix_memalign(&memory, kAlignment, kHeader + capacity) != 0) {
          std::lock_guard lock(mutex_);
          allocated_ -= static_cast<int64_t>(bytes);
          if (capacity >= kSmallest) live_bytes_ -= static_cast<int64_t>(capacity);
          throw std::bad_alloc();
        }
      }
      header = static_cast<Header*>(memory);
      header->capacity = capacity;
    }
    header->asked = bytes;
    return reinterpret_cast<char*>(header) + kHeader;
  }

  // A kept block of that class or a little above, or null. The lock is held.
  Header* take_kept(size_t index) {
    for (size_t i = index; i <= index + kLargerClasses && i < kept_.size(); ++i) {
      if (kept_[i].empty()) continue;
      Header* header = kept_[i].back();
      kept_[i].pop_back();
      kept_bytes_ -= static_cast<int64_t>(header->capacity);
      return header;
    }
    return nullptr;
  }

  // Frees the blocks that have been kept longest until what is mapped is within bounds. The lock is held.
  void drop_oldest() {
    while (kept_bytes_ > 0 && live_bytes_ + kept_bytes_ > live_peak_ + live_peak_ / kKeptPart) {
      std::vector<Header*>* oldest = nullptr;
      for (auto& list : kept_)  // of a class, the first was given back first
        if (!list.empty() && (!oldest || list.front()->kept_since < oldest->front()->kept_since))
          oldest = &list;
      Header* header = oldest->front();
      oldest->erase(oldest->begin());
      kept_bytes_ -= static_cast<int64_t>(header->capacity);
      std::free(header);
    }
  }

  static void give_back(void* data) {
    if (!data) return;
    auto& self = instance();
    auto* header = reinterpret_cast<Header*>(static_cast<char*>(data) - kHeader);
    std::unique_lock lock(self.mutex_);
    self.allocated_ -= static_cast<int64_t>(header->asked);
    if (header->capacity >= kSmallest) {
      self.live_bytes_ -= static_cast<int64_t>(header->capacity);
      self.kept_bytes_ += static_cast<int64_t>(header->capacity);
      header->kept_since = ++self.num_given_back_;
      self.kept_[class_index(header->capacity)].push_back(header);
      return;
    }
    lock.unlock();
    std::free(header);
  }

  std::mutex mutex_;
  int64_t allocated_ = 0;
  int64_t peak_ = 0;
  int64_t live_bytes_ = 0, kept_bytes_ = 0;  // capacities of the blocks that may be kept
  int64_t live_peak_ = 0;
  uint64_t num_given_back_ = 0;
  std::array<std::vector<Header*>, 64 * kClassesPerDoubling> kept_;
};
}  // namespace

void install_cpu_allocator() {
#ifdef M_MMAP_THRESHOLD
  mallopt(M_MMAP_THRESHOLD, kMapped);
#endif
  c10::SetCPUAllocator(&KeepingAllocator::instance(), /*priority=*/100);
}
int64_t cpu_allocated_bytes() {
  return KeepingAllocator::instance().allocated();
}
int64_t cpu_peak_bytes() {
  return KeepingAllocator::instance().peak();
}
void reset_cpu_peak_bytes() {
  KeepingAllocator::instance().reset_peak();
}
void release_kept_cpu_blocks() {
  KeepingAllocator::instance().release();
}

}  // namespace bough
