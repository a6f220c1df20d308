// Checks every access of a kernel to device memory and shared memory. clang compiles the kernels with
// -fsanitize=thread, which calls the __tsan_* functions below before each access. ThreadSanitizer's own
// library is not linked.
//
// Two accesses to the same bytes, one of them a write, by different threads of one launch are a race unless
//   - a barrier of the block lies between them, or
//   - a barrier of the warp lies between them and both threads are of that warp.
// Blocks of a launch are never ordered. Atomic operations are not checked.
#include "races.h"

#include <execinfo.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

#include "block.h"

namespace bough::emulation {
namespace {

constexpr size_t kDeviceBytes = size_t{16} << 30;  // of addresses; memory is used where something is written
constexpr size_t kAlignment = 256;
// Each byte has a cell, but of a longer access only every second byte is checked: only arrays of int8_t
// have smaller elements.
constexpr size_t kStep = 2;

// When an access happened. `block` is the serial number among the blocks of all launches.
struct Time {
  uint64_t launch = 0, block = 0;
  uint32_t barriers = 0, syncs = 0;
  bool same_barrier(const Time& other) const { return block == other.block && barriers == other.barriers; }
};

// The last write of some bytes, and the reads since the last barrier in which they were read.
struct Cell {
  Time write, read;
  uint16_t writer = 0;
  uint16_t read_warp = 0;       // whose lanes `read_lanes` are
  uint32_t read_warps = 0;      // bit mask
  uint32_t read_lanes = 0;      // bit mask; since the last barrier of the warp
  bool read_by_blocks = false;  // several blocks of the launch
};

void* map_memory(size_t bytes) {
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("no memory for the race detector");
  return memory;
}

struct Region {
  char* begin = nullptr;
  size_t bytes = 0;
  Cell* cells = nullptr;
  bool shared = false;

  Region(char* from, size_t size, bool is_shared)
      : begin(from),
        bytes(size),
        cells(static_cast<Cell*>(map_memory(size * sizeof(Cell)))),
        shared(is_shared) {}
  bool holds(const char* p) const { return p >= begin && p < begin + bytes; }
};

std::vector<Region>& regions() {
  static auto* const instance = new std::vector<Region>;
  return *instance;
}

[[noreturn]] void report(const char* what, const Region& region, const char* p) {
  std::fprintf(stderr, "CUDA emulation: race: %s, %s memory, byte %zu\n", what,
               region.shared ? "shared" : "device", static_cast<size_t>(p - region.begin));
  void* frames[12];
  backtrace_symbols_fd(frames, backtrace(frames, 12), STDERR_FILENO);
  fail("race");
}

void check_write(const Region& region, const Cell& cell, const Time& now, uint32_t warp_number, uint32_t lane,
                 const char* p) {
  if (cell.read.launch != now.launch) return;
  if (!region.shared && (cell.read.block != now.block || cell.read_by_blocks))
    report("write of bytes that another block reads", region, p);
  if (!cell.read.same_barrier(now)) return;
  if (cell.read_warps & ~(1u << warp_number)) report("write of bytes that another warp reads", region, p);
  if (cell.read_warp == warp_number && cell.read.syncs == now.syncs && (cell.read_lanes & ~(1u << lane)))
    report("write of bytes that another lane reads", region, p);
}

void note_read(Cell& cell, const Time& now, uint32_t warp_number, uint32_t lane) {
  if (!cell.read.same_barrier(now) || cell.read.launch != now.launch) {
    const bool same_launch = cell.read.launch == now.launch;
    cell.read_by_blocks = same_launch && (cell.read_by_blocks || cell.read.block != now.block);
    cell.read_warps = cell.read_lanes = 0;
  }
  if (cell.read_warp != warp_number || cell.read.syncs != now.syncs) cell.read_lanes = 0;
  cell.read = now;
  cell.read_warp = static_cast<uint16_t>(warp_number);
  cell.read_warps |= 1u << warp_number;
  cell.read_lanes |= 1u << lane;
}

void access(const void* address, size_t bytes, bool is_write) {
  if (!thread) return;
  const char* const p = static_cast<const char*>(address);
  const Region* region = nullptr;
  for (const Region& r : regions())
    if (r.holds(p)) region = &r;
  if (!region) return;
  const auto number = static_cast<uint32_t>(thread->number), warp_number = number / kLanes,
             lane = number % kLanes;
  const Time now{block->launch, block->serial, static_cast<uint32_t>(block->barriers),
                 static_cast<uint32_t>(warp().syncs)};
  const auto first = static_cast<size_t>(p - region->begin);
  for (size_t i = 0; i < bytes; i += kStep) {
    Cell& cell = region->cells[first + i];
    if (cell.write.launch == now.launch) {
      if (cell.write.block != now.block) {
        if (!region->shared)
          report(is_write ? "two blocks write" : "read of another block's write", *region, p);
      } else if (cell.writer != number && cell.write.barriers == now.barriers &&
                 (cell.writer / kLanes != warp_number || cell.write.syncs == now.syncs)) {
        report(is_write ? "two threads write" : "read of another thread's write", *region, p);
      }
    }
    if (is_write) {
      check_write(*region, cell, now, warp_number, lane, p);
      cell.write = now;
      cell.writer = static_cast<uint16_t>(number);
    } else {
      note_read(cell, now, warp_number, lane);
    }
  }
}

struct DeviceArena {
  size_t used = 0;
  std::multimap<size_t, char*> freed;  // by bytes
};
std::mutex mutex;
DeviceArena& arena() {
  static auto* const instance = [] {
    regions().emplace_back(static_cast<char*>(map_memory(kDeviceBytes)), kDeviceBytes, /*shared=*/false);
    return new DeviceArena;
  }();
  return *instance;
}

size_t rounded(size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
}

}  // namespace

void* allocate_checked_memory(size_t bytes) {
  const std::lock_guard lock(mutex);
  auto& memory = arena();
  if (const auto found = memory.freed.find(rounded(bytes)); found != memory.freed.end()) {
    char* const data = found->second;
    memory.freed.erase(found);
    return data;
  }
  char* const data = regions().front().begin + memory.used;
  memory.used += rounded(bytes);
  if (memory.used > kDeviceBytes) fail("the race detector's device memory is full");
  return data;
}

void free_checked_memory(void* data, size_t bytes) {
  const std::lock_guard lock(mutex);
  arena().freed.emplace(rounded(bytes), static_cast<char*>(data));
}

void check_shared_memory(char* begin, size_t bytes) {
  arena();  // the first region
  regions().emplace_back(begin, bytes, /*shared=*/true);
}

}  // namespace bough::emulation

// The functions that -fsanitize=thread calls, and the C library's that copy (the linker's --wrap).
using bough::emulation::access;
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void* /*caller*/) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void** /*p*/, void* /*value*/) {}
void __tsan_vptr_read(void** /*p*/) {}
#define BOUGH_ACCESSES(n)                        \
  void __tsan_read##n(void* p) {                 \
    access(p, n, false);                         \
  }                                              \
  void __tsan_write##n(void* p) {                \
    access(p, n, true);                          \
  }                                              \
  void __tsan_unaligned_read##n(void* p) {       \
    access(p, n, false);                         \
  }                                              \
  void __tsan_unaligned_write##n(void* p) {      \
    access(p, n, true);                          \
  }                                              \
  void __tsan_read_write##n(void* p) {           \
    access(p, n, false), access(p, n, true);     \
  }                                              \
  void __tsan_unaligned_read_write##n(void* p) { \
    access(p, n, false), access(p, n, true);     \
  }
BOUGH_ACCESSES(1)
BOUGH_ACCESSES(2)
BOUGH_ACCESSES(4)
BOUGH_ACCESSES(8)
BOUGH_ACCESSES(16)
void* __real_memcpy(void* to, const void* from, size_t bytes);
void* __real_memset(void* to, int value, size_t bytes);
void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  access(from, bytes, false);
  access(to, bytes, true);
  return __real_memcpy(to, from, bytes);
}
void* __wrap_memset(void* to, int value, size_t bytes) {
  access(to, bytes, true);
  return __real_memset(to, value, bytes);
}
}
