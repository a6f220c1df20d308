// Checks the order of work on the emulated device. The stand-in runs all work at once, in the order in which
// the host queues it. A GPU runs the work of different streams in any order that events and waits allow, and
// the host goes on meanwhile. This file keeps a vector clock for each stream and for each thread of the host,
// and the last accesses to each allocation. Two accesses to the same bytes, one of them a write, must be
// ordered by the order within a stream, by events or by waits of the host; else the process ends with a
// message.
//
// A thread knows what it has waited for itself, what other threads had waited for when they gave back a mutex
// that it took later, and at its begin and when it joins a thread, what any thread had waited for.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bough::emulation {

// Stream 0 is the default stream. Like CUDA, each pool has 32 streams, which are handed out in turn.
constexpr int kPoolStreams = 32, kStreams = 1 + 2 * kPoolStreams;

// For each stream: how much of its work is known to be done.
using Clock = std::array<uint64_t, kStreams>;

struct Access {
  const void* begin;
  size_t bytes;
  bool is_write;
};

enum class MemoryKind { kDevice, kPinned };

// `stream`: on which device memory was allocated. Once it is freed, work that is queued on this stream later
// may get the memory again. So new memory counts as memory that earlier work of the stream may still use.
void memory_allocated(const void* begin, size_t bytes, MemoryKind kind, int stream);
// Device memory must not be in use by other streams, unless stream_uses() named them. Pinned memory may be in
// use by copies: libtorch's allocator waits for them before the memory is used again.
void memory_freed(const void* begin);
void stream_uses(const void* begin, int stream);  // Tensor::record_stream
// A number that no other allocation had or has; 0 if there is no allocation.
uint64_t allocation_at(const void* address);

// The host queues `op` on the stream. Accesses to other memory than allocations of the device or pinned
// memory do not count.
void stream_works(int stream, const char* op, const std::vector<Access>& accesses);
// The host itself accesses the byte at `address` of pinned memory.
void host_accesses(const void* address, bool is_write);

// Edges.
Clock clock_of(int stream);  // for an event that is recorded on the stream
void stream_waits(int stream, const Clock& event);
void host_waits(const Clock& event);  // the calling thread
void host_waits_for_stream(int stream);
void host_waits_for_device();

}  // namespace bough::emulation
