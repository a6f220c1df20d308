#include "kernels/common/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/mutex.h"
#include "kernels/common/arena.h"

namespace bough {

namespace {
constexpr size_t kHeader = Arena::kAlignment;  // before each block; it keeps the alignment
constexpr size_t kSmallest = 64 << 10;         // malloc serves smaller blocks
// malloc maps each block of at least this many bytes separately, and unmaps the block when it is freed.
// Setting the threshold keeps glibc from raising it, so large freed blocks outside the arena go back to the
// system.
constexpr int kMapped = 1 << 20;

struct Header {
  size_t asked;
};

// The address space is twice the memory, because free parts between blocks may be too small to use.
size_t address_bytes() {
  return 2 * static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

class ArenaAllocator final : public c10::Allocator {
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
    const MutexLock lock(mutex_);
    return allocated_;
  }
  int64_t peak() {
    const MutexLock lock(mutex_);
    return peak_;
  }
  void reset_peak() {
    const MutexLock lock(mutex_);
    peak_ = allocated_;
  }
  void release() {
    const MutexLock lock(mutex_);
    arena_.discard();
  }

  static ArenaAllocator& instance() {
    // The allocator is never destroyed, because tensors of static duration are freed after main.
    static auto* allocator = new ArenaAllocator;
    return *allocator;
  }

 private:
  ArenaAllocator() : arena_(address_bytes()) {}

  void* take(size_t bytes) {
    const size_t whole = kHeader + bytes;
    void* memory = nullptr;
    MutexLock lock(mutex_);
    if (bytes >= kSmallest) memory = arena_.take(whole);
    if (!memory && posix_memalign(&memory, Arena::kAlignment, whole) != 0) throw std::bad_alloc();
    allocated_ += static_cast<int64_t>(bytes);
    peak_ = std::max(peak_, allocated_);
    lock.unlock();
    static_cast<Header*>(memory)->asked = bytes;
    return static_cast<char*>(memory) + kHeader;
  }

  static void give_back(void* data) {
    if (!data) return;
    auto& self = instance();
    void* memory = static_cast<char*>(data) - kHeader;
    const size_t bytes = static_cast<Header*>(memory)->asked;
    {
      const MutexLock lock(self.mutex_);
      self.allocated_ -= static_cast<int64_t>(bytes);
      if (self.arena_.contains(memory)) {
        self.arena_.give_back(memory, kHeader + bytes);
        return;
      }
    }
    std::free(memory);
  }

  Mutex mutex_;
  Arena arena_ GUARDED_BY(mutex_);
  int64_t allocated_ GUARDED_BY(mutex_) = 0;
  int64_t peak_ GUARDED_BY(mutex_) = 0;
};
}  // namespace

void install_cpu_allocator() {
#ifdef M_MMAP_THRESHOLD
  mallopt(M_MMAP_THRESHOLD, kMapped);
#endif
  c10::SetCPUAllocator(&ArenaAllocator::instance(), /*priority=*/100);
}

CpuAllocatorScope::CpuAllocatorScope() : before_(c10::GetCPUAllocator()) {
  c10::SetCPUAllocator(&ArenaAllocator::instance(), /*priority=*/100);
}
CpuAllocatorScope::~CpuAllocatorScope() {
  c10::SetCPUAllocator(before_, /*priority=*/100);
}

int64_t cpu_allocated_bytes() {
  return ArenaAllocator::instance().allocated();
}
int64_t cpu_peak_bytes() {
  return ArenaAllocator::instance().peak();
}
void reset_cpu_peak_bytes() {
  ArenaAllocator::instance().reset_peak();
}
void release_freed_cpu_memory() {
  ArenaAllocator::instance().release();
}

}  // namespace bough
