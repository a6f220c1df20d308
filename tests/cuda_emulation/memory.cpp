#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#include "block.h"
#include "races.h"

#ifdef BOUGH_EMULATION_ASAN
#include <sanitizer/asan_interface.h>
#endif

// The bounds of the section that holds the arrays declared with __shared__.
extern "C" char __start_bough_shared[] __attribute__((weak));
extern "C" char __stop_bough_shared[] __attribute__((weak));

namespace bough::emulation {

namespace {

constexpr size_t kAlignment = 256;  // as cudaMalloc
constexpr int64_t kMaxSharedBytes = 228 << 10;

std::mutex mutex;
std::map<char*, size_t>& allocations() {
  static auto* const instance = new std::map<char*, size_t>;
  return *instance;
}

// Also fills the bytes after the last whole word.
void fill_with(char* to, size_t bytes, uint32_t fill) {
  for (size_t i = 0; i < bytes; i += 4) std::memcpy(to + i, &fill, std::min<size_t>(4, bytes - i));
}

uint32_t word_at(const char* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

}  // namespace

void* allocate_device_memory(size_t bytes) {
  if (bytes == 0) return nullptr;
#ifdef BOUGH_EMULATION_RACES
  void* const data = allocate_checked_memory(bytes);
#else
  void* data = nullptr;
  if (posix_memalign(&data, kAlignment, bytes) != 0) throw std::bad_alloc();
#endif
  fill_with(static_cast<char*>(data), bytes, kFill);
  const std::lock_guard lock(mutex);
  allocations()[static_cast<char*>(data)] = bytes;
  return data;
}

void free_device_memory(void* data) {
  const std::lock_guard lock(mutex);
#ifdef BOUGH_EMULATION_RACES
  free_checked_memory(data, allocations().at(static_cast<char*>(data)));
#else
  std::free(data);
#endif
  allocations().erase(static_cast<char*>(data));
}

DeviceMemory save_device_memory() {
  const std::lock_guard lock(mutex);
  DeviceMemory saved;
  for (const auto& [data, bytes] : allocations()) saved[data].assign(data, data + bytes);
  return saved;
}

void restore_device_memory(const DeviceMemory& memory, uint32_t fill) {
  for (const auto& [data, bytes] : memory) {
    std::memcpy(data, bytes.data(), bytes.size());
    for (size_t i = 0; fill != kFill && i + 4 <= bytes.size(); i += 4)
      if (word_at(data + i) == kFill) std::memcpy(data + i, &fill, 4);
  }
}

bool device_memory_equals(const DeviceMemory& memory, uint32_t fill) {
  for (const auto& [data, bytes] : memory) {
    if (std::memcmp(data, bytes.data(), bytes.size()) == 0) continue;
    for (size_t i = 0; i < bytes.size(); i += 4) {
      if (i + 4 > bytes.size()) {
        if (std::memcmp(data + i, bytes.data() + i, bytes.size() - i) != 0) return false;
      } else if (word_at(bytes.data() + i) != word_at(data + i) &&
                 !(word_at(bytes.data() + i) == kFill && word_at(data + i) == fill)) {
        return false;
      }
    }
  }
  return true;
}

// The memory ends where the dynamic shared memory ends, and begins at a multiple of kAlignment.
char* begin_shared_memory(int64_t bytes, uint32_t fill) {
  alignas(kAlignment) static char memory[kMaxSharedBytes + kAlignment];
#ifdef BOUGH_EMULATION_ASAN
  __asan_unpoison_memory_region(memory, sizeof memory);
  fill_with(memory, static_cast<size_t>(bytes), fill);
  __asan_poison_memory_region(memory + bytes, sizeof memory - static_cast<size_t>(bytes));
#else
  fill_with(memory, static_cast<size_t>(bytes), fill);
#endif
#ifdef BOUGH_EMULATION_RACES
  [[maybe_unused]] static const bool checked = [] {
    check_shared_memory(memory, sizeof memory);
    check_shared_memory(__start_bough_shared,
                        static_cast<size_t>(__stop_bough_shared - __start_bough_shared));
    return true;
  }();
#endif
  if (__start_bough_shared)
    fill_with(__start_bough_shared, static_cast<size_t>(__stop_bough_shared - __start_bough_shared), fill);
  return memory;
}

}  // namespace bough::emulation
