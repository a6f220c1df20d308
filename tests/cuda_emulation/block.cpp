// BOUGH_EMULATION_ASAN says that the kernels are compiled with AddressSanitizer. This file is not, for speed.
#include "block.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>

#include "lock.h"
#include "memory.h"

#ifdef BOUGH_EMULATION_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

namespace bough::emulation {

Block* block = nullptr;
Thread* thread = nullptr;

namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr int kMaxThreads = 1024;
constexpr int64_t kMaxSharedBytes = 227 << 10;  // of an H100, if the launch asks for it

// The scheduler's side of a switch to a fiber.
void* scheduler_stack_pointer = nullptr;
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
size_t scheduler_stack_bytes = 0;
const std::function<void()>* kernel_body = nullptr;

// Saves the registers that a call must keep (System V ABI of x86-64) and the stack pointer, then goes on
// where `to` was saved.
extern "C" void bough_emulation_switch(void** save, void* to);
asm(R"(
.text
.globl bough_emulation_switch
.hidden bough_emulation_switch
.type bough_emulation_switch,@function
bough_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size bough_emulation_switch,.-bough_emulation_switch
)");

// Stacks of fibers, each above a page that no access may touch. They are kept for later launches.
char* stack_of(size_t number) {
  static auto* const stacks = new std::vector<char*>;
  while (stacks->size() <= number) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* const memory = mmap(nullptr, page + kStackBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0)
      fail("no memory for a thread's stack");
    stacks->push_back(static_cast<char*>(memory) + page);
  }
  return (*stacks)[number];
}

void to_scheduler([[maybe_unused]] bool ends) {
  Thread* const self = thread;
#ifdef BOUGH_EMULATION_ASAN
  __sanitizer_start_switch_fiber(ends ? nullptr : &self->fake_stack, scheduler_stack, scheduler_stack_bytes);
#endif
  bough_emulation_switch(&self->stack_pointer, scheduler_stack_pointer);
#ifdef BOUGH_EMULATION_ASAN
  __sanitizer_finish_switch_fiber(self->fake_stack, nullptr, nullptr);
#endif
}

void thread_main() {
#ifdef BOUGH_EMULATION_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
  (*kernel_body)();
  if (!thread->copies.empty()) fail("a thread ends before its asynchronous copies have arrived");
  thread->ended = true;
  ++block->ended;
  to_scheduler(/*ends=*/true);
}

void to_fiber(Thread& next) {
  thread = &next;
#ifdef BOUGH_EMULATION_ASAN
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, stack_of(static_cast<size_t>(next.number)),
                                 kStackBytes);
#endif
  bough_emulation_switch(&scheduler_stack_pointer, next.stack_pointer);
#ifdef BOUGH_EMULATION_ASAN
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
  thread = nullptr;
}

void prepare(Thread& t) {
  auto* top = reinterpret_cast<void**>(stack_of(static_cast<size_t>(t.number)) + kStackBytes);
  *--top = nullptr;  // where thread_main would return to; keeps the stack aligned as after a call
  *--top = reinterpret_cast<void*>(&thread_main);
  for (int r = 0; r < 6; ++r) *--top = nullptr;
  t.stack_pointer = top;
}

void wait(const uint64_t& generation, uint64_t until) {
  thread->generation = &generation;
  thread->until = until;
  to_scheduler(/*ends=*/false);
  thread->generation = nullptr;
}

enum class Order { kForward, kReverse, kRandom };

void run_block(const std::vector<int>& numbers, Order order, std::mt19937& random) {
  std::vector<int> sequence = numbers;
  if (order == Order::kReverse) std::reverse(sequence.begin(), sequence.end());
  while (block->ended < static_cast<int>(sequence.size())) {
    if (order == Order::kRandom) std::shuffle(sequence.begin(), sequence.end(), random);
    bool any = false;
    for (const int number : sequence) {
      Thread& next = block->threads[static_cast<size_t>(number)];
      if (next.ended || (next.generation && *next.generation < next.until)) continue;
      any = true;
      to_fiber(next);
    }
    if (!any) fail("threads wait for others that have ended or wait elsewhere");
  }
}

dim3 index_in(dim3 size, uint64_t number) {
  return {static_cast<unsigned>(number % size.x), static_cast<unsigned>(number / size.x % size.y),
          static_cast<unsigned>(number / size.x / size.y)};
}

void run_grid(dim3 grid, dim3 threads, int64_t shared_bytes, Order order, uint32_t fill) {
  const uint64_t num_blocks = uint64_t{grid.x} * grid.y * grid.z;
  const unsigned num_threads = threads.x * threads.y * threads.z;
  std::mt19937 random(7);
  std::vector<int> numbers(num_threads);
  std::iota(numbers.begin(), numbers.end(), 0);
  static uint64_t launch = 0;
  Block b;
  b.launch = ++launch;
  block = &b;
  for (uint64_t i = 0; i < num_blocks; ++i) {
    static uint64_t serial = 0;
    b.index = index_in(grid, order == Order::kReverse ? num_blocks - 1 - i : i);
    b.size = threads;
    b.grid = grid;
    b.threads.resize(num_threads);
    b.warps.assign(num_threads / kLanes, {});
    b.arrived = b.ended = 0;
    b.barriers = 0;
    b.serial = ++serial;
    b.shared_bytes = shared_bytes;
    b.shared = begin_shared_memory(shared_bytes, fill);
    for (const int number : numbers) {
      Thread& t = b.threads[static_cast<size_t>(number)];
      t.number = number;
      t.ended = false;
      t.index = index_in(threads, static_cast<uint64_t>(number));
      prepare(t);
    }
    run_block(numbers, order, random);
    if (b.arrived != 0) fail("threads end while others wait at a barrier");
  }
  block = nullptr;
}

uint64_t repeated_threads() {
  static const char* const wanted = std::getenv("BOUGH_EMULATION_REPEAT");
  return wanted ? std::strtoull(wanted, nullptr, 10) : 0;
}

}  // namespace

void fail(const char* what) {
  std::fprintf(stderr, "CUDA emulation: %s", what);
  if (block)
    std::fprintf(stderr, ", block %u %u %u, thread %d", block->index.x, block->index.y, block->index.z,
                 thread ? thread->number : -1);
  std::fprintf(stderr, "\n");
#ifdef BOUGH_EMULATION_ASAN
  __sanitizer_print_stack_trace();
#endif
  std::abort();
}

void sync_threads() {
  const uint64_t mine = block->barriers + 1;
  if (++block->arrived == static_cast<int>(block->threads.size())) {
    block->arrived = 0;
    ++block->barriers;
  } else {
    wait(block->barriers, mine);
  }
}

void meet(Meeting meeting, const void* in, void* out, void (*compute)(const void* const*, void* const*)) {
  Warp& w = warp();
  const uint64_t mine = w.generation + 1;
  if (w.arrived == 0) w.meeting = meeting;
  if (w.meeting != meeting) fail("lanes of a warp meet in different operations");
  w.in[thread->lane()] = in;
  w.out[thread->lane()] = out;
  if (++w.arrived < kLanes) return wait(w.generation, mine);
  compute(w.in, w.out);
  w.arrived = 0;
  ++w.generation;
}

void run(dim3 grid, dim3 threads, int64_t shared_bytes, const std::function<void()>& kernel) {
  static Lock mutex;
  const std::lock_guard lock(mutex);
  const unsigned num_threads = threads.x * threads.y * threads.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 || num_threads == 0 ||
      num_threads > kMaxThreads || num_threads % kLanes != 0 || shared_bytes < 0 ||
      shared_bytes > kMaxSharedBytes) {
    std::fprintf(stderr, "CUDA emulation: a launch of %u x %u x %u blocks, %u threads, %lld bytes\n", grid.x,
                 grid.y, grid.z, num_threads, static_cast<long long>(shared_bytes));
    std::abort();
  }
  kernel_body = &kernel;
  if (uint64_t{grid.x} * grid.y * grid.z * num_threads > repeated_threads())
    return run_grid(grid, threads, shared_bytes, Order::kForward, kFill);
  const auto before = save_device_memory();
  run_grid(grid, threads, shared_bytes, Order::kForward, kFill);
  const auto after = save_device_memory();
  for (const auto& [order, fill] : {std::pair(Order::kReverse, kOtherFill), {Order::kRandom, kFill}}) {
    restore_device_memory(before, fill);
    run_grid(grid, threads, shared_bytes, order, fill);
    if (!device_memory_equals(after, fill))
      fail(order == Order::kRandom ? "another order of the threads gives another result"
                                   : "the reverse order or another fill of memory gives another result");
  }
  restore_device_memory(after, kFill);
}

}  // namespace bough::emulation
