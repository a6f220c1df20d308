// The CPU allocator of all tensors. It keeps the memory of freed blocks for the next pass and counts bytes.
//
// Training passes allocate and free the same sizes again and again. malloc would map every large block and
// fault in its pages each time, which takes a sixth to a quarter of a step. Blocks of 64 KiB and more
// therefore come from one arena (arena.h), which keeps its pages. Resident memory stays close to the peak of
// live bytes.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

namespace bough {

// Sets libtorch's CPU allocator. Blocks allocated before are freed by their own allocator. Idempotent.
void install_cpu_allocator();

// Sets the same allocator until the end of the scope, then the one before. For a process that is not ours: a
// Python program. Blocks that are still live afterwards are freed by the allocator that they came from. Other
// threads use the allocator, too, while the scope lasts. Scopes of several threads must not overlap.
class CpuAllocatorScope {
 public:
  CpuAllocatorScope();
  ~CpuAllocatorScope();
  CpuAllocatorScope(const CpuAllocatorScope&) = delete;
  CpuAllocatorScope& operator=(const CpuAllocatorScope&) = delete;

 private:
  c10::Allocator* const before_;
};

// Requested bytes of the live tensors that were allocated since install_cpu_allocator().
int64_t cpu_allocated_bytes();
// The peak of cpu_allocated_bytes() since the last reset.
int64_t cpu_peak_bytes();
void reset_cpu_peak_bytes();
// Returns the pages of freed blocks to the system.
void release_freed_cpu_memory();

}  // namespace bough
