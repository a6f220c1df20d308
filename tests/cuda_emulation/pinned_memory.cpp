#include "pinned_memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <map>

#include "block.h"
#include "host_order.h"

namespace bough::emulation {

namespace {

Lock copies_mutex;  // of StreamsPinnedAccess

struct Pinned {
  Lock mutex;
  std::map<const char*, size_t> bytes_of;  // whole pages
};
Pinned& pinned() {
  static auto* const instance = new Pinned;
  return *instance;
}

size_t page_size() {
  static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

char* page_of(const void* address) {
  return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(address) / page_size() * page_size());
}

void protect(char* begin, size_t bytes, int protection) {
  char* const first = page_of(begin);
  if (mprotect(first, static_cast<size_t>(begin + bytes - first), protection) != 0)
    fail("cannot protect pinned memory");
}

struct sigaction previous_action;

void on_fault(int /*signal*/, siginfo_t* info, void* context) {
  if (!is_pinned_memory(info->si_addr)) {
    sigaction(SIGSEGV, &previous_action, nullptr);  // the access faults again, and the other handler runs
    return;
  }
  const auto& registers = static_cast<const ucontext_t*>(context)->uc_mcontext.gregs;
  host_accesses(info->si_addr, /*is_write=*/(registers[REG_ERR] & 2) != 0);
  // The rest of the page is no longer watched.
  protect(page_of(info->si_addr), page_size(), PROT_READ | PROT_WRITE);
}

void install_handler() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  if (sigaction(SIGSEGV, &action, &previous_action) != 0) fail("cannot watch pinned memory");
}

}  // namespace

void* allocate_pinned_memory(size_t bytes) {
  [[maybe_unused]] static const bool installed = (install_handler(), true);
  const size_t pages = (std::max<size_t>(bytes, 1) + page_size() - 1) / page_size() * page_size();
  void* const data =
      mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) fail("no memory to pin");
  memory_allocated(data, pages, MemoryKind::kPinned, /*stream=*/0);
  Pinned& p = pinned();
  const std::lock_guard lock(p.mutex);
  p.bytes_of[static_cast<char*>(data)] = pages;
  return data;
}

void free_pinned_memory(void* data) {
  if (!data) return;
  memory_freed(data);
  Pinned& p = pinned();
  const std::lock_guard lock(p.mutex);
  const auto found = p.bytes_of.find(static_cast<char*>(data));
  munmap(data, found->second);
  p.bytes_of.erase(found);
}

bool is_pinned_memory(const void* address) {
  Pinned& p = pinned();
  const std::lock_guard lock(p.mutex);
  const auto after = p.bytes_of.upper_bound(static_cast<const char*>(address));
  if (after == p.bytes_of.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return static_cast<const char*>(address) < begin + bytes;
}

StreamsPinnedAccess::StreamsPinnedAccess(const void* begin, size_t bytes, bool is_write)
    : lock_(copies_mutex),
      begin_(static_cast<char*>(const_cast<void*>(begin))),
      bytes_(bytes),
      is_write_(is_write) {
  protect(begin_, bytes_, PROT_READ | PROT_WRITE);
}

StreamsPinnedAccess::~StreamsPinnedAccess() {
  protect(begin_, bytes_, is_write_ ? PROT_NONE : PROT_READ);
}

}  // namespace bough::emulation
