// Runs a kernel on a CPU. The threads of a block are fibers of one OS thread: a thread runs until it must
// wait for others at a barrier or in an operation of its warp. Blocks run one after another.
//
// A launch ends the process with a message if threads wait for others that never come, if lanes of a warp
// meet in different operations, or if a thread ends before its asynchronous copies arrived.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

struct CUstream_st;
using cudaStream_t = CUstream_st*;

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace bough::emulation {

constexpr int kLanes = 32;

// An asynchronous copy to shared memory that its thread has not waited for.
struct Copy {
  char* to;
  int bytes;
  char data[16];
};

struct Thread {
  dim3 index;
  int number = 0;
  bool ended = false;
  void* stack_pointer = nullptr;
  void* fake_stack = nullptr;  // AddressSanitizer's
  // The thread waits until *generation is at least `until`; nullptr if it does not wait.
  const uint64_t* generation = nullptr;
  uint64_t until = 0;
  std::vector<Copy> copies;

  int lane() const { return number % kLanes; }
};

// The operation in which lanes of a warp meet.
enum class Meeting { kSync, kShuffleXor, kShuffleDown, kShuffle, kBallot, kLoad, kLoadTransposed, kMultiply };

struct Warp {
  Meeting meeting = Meeting::kSync;
  int arrived = 0;
  uint64_t generation = 0;
  uint64_t syncs = 0;  // barriers of this warp, for the race detector
  const void* in[kLanes] = {};
  void* out[kLanes] = {};
};

struct Block {
  dim3 index, size, grid;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  int arrived = 0, ended = 0;
  uint64_t barriers = 0;
  uint64_t launch = 0, serial = 0;  // numbers among all launches and all blocks of the process
  char* shared = nullptr;
  int64_t shared_bytes = 0;
};

extern Block* block;
extern Thread* thread;
inline Warp& warp() {
  return block->warps[static_cast<size_t>(thread->number / kLanes)];
}

// Writes what is wrong, where, and the stack of the calls; ends the process.
[[noreturn]] void fail(const char* what);

void sync_threads();
// Waits until all lanes of the warp are here. The last lane calls `compute` with the arguments and results
// of all.
void meet(Meeting meeting, const void* in, void* out, void (*compute)(const void* const*, void* const*));

// Runs the kernel. A launch of at most BOUGH_EMULATION_REPEAT threads (an environment variable; 0 without
// it) runs three times on the same memory: with the threads in three orders, and with two fills of shared
// memory and of device memory that nothing has written. A difference in any byte of device memory ends the
// process.
void run(dim3 grid, dim3 threads, int64_t shared_bytes, const std::function<void()>& kernel);

template <class In, class Out>
struct Lanes {
  const void* const* in;
  void* const* out;
  const In& get(int lane) const { return *static_cast<const In*>(in[lane]); }
  Out& set(int lane) const { return *static_cast<Out*>(out[lane]); }
};

// meet() with typed arguments: compute(Lanes<In, Out>).
template <class Out, Meeting meeting, class In, class Compute>
Out meet_with(const In& in, Compute /*compute*/) {
  Out out{};
  meet(meeting, &in, &out, [](const void* const* ins, void* const* outs) {
    Compute()(Lanes<In, Out>{ins, outs});
  });
  return out;
}

}  // namespace bough::emulation
