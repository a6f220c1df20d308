#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#include "block.h"
#include "lock.h"
#include "races.h"

#ifdef BOUGH_EMULATION_ASAN
#include <sanitizer/asan_interface.h>
#endif

// Defined in shared_memory.ld.
extern "C" __attribute__((visibility("hidden"))) char bough_shared_begin[];
extern "C" __attribute__((visibility("hidden"))) char bough_shared_end[];

namespace bough::emulation {

namespace {

constexpr size_t kAlignment = 256;  // as cudaMalloc
constexpr int64_t kMaxSharedBytes = 228 << 10;

Lock mutex;
std::map<char*, size_t>& allocations() {
  static auto* const instance = new std::map<char*, size_t>;
  return *instance;
}

// Also fills the bytes after the last whole word. Volatile, because AddressSanitizer checks calls of memset and
// memcpy, and the red zones between shared variables are filled as well.
void fill_with(char* to, size_t bytes, uint32_t fill) {
  size_t i = 0;
  for (; i + 4 <= bytes; i += 4) *reinterpret_cast<volatile uint32_t*>(to + i) = fill;
  for (; i < bytes; ++i) *reinterpret_cast<volatile char*>(to + i) = static_cast<char>(fill >> (8 * (i % 4)));
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

// By bytes, because a kernel may write half a word.
bool device_memory_equals(const DeviceMemory& memory, uint32_t fill) {
  const auto byte = [](uint32_t word, size_t i) { return static_cast<char>(word >> (8 * (i % 4))); };
  for (const auto& [data, bytes] : memory) {
    if (std::memcmp(data, bytes.data(), bytes.size()) == 0) continue;
    for (size_t i = 0; i < bytes.size(); ++i)
      if (bytes[i] != data[i] && !(bytes[i] == byte(kFill, i) && data[i] == byte(fill, i))) return false;
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
    check_shared_memory(bough_shared_begin, static_cast<size_t>(bough_shared_end - bough_shared_begin));
    return true;
  }();
#endif
  fill_with(bough_shared_begin, static_cast<size_t>(bough_shared_end - bough_shared_begin), fill);
  return memory;
}

}  // namespace bough::emulation
