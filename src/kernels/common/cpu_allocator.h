// The CPU allocator of all tensors: keeps the memory of freed blocks for the next pass, and counts.
//
// A training pass allocates and frees the same sizes again and again; with plain malloc each large one is
// mapped and its pages faulted in anew, a sixth to a quarter of a step. Blocks of 64 KiB and more are cut
// from one arena (arena.h), whose pages stay: what is resident is what lived at the peak and little more,
// whatever sizes passes have.
#pragma once

#include <cstdint>

namespace bough {

// Makes the arena libtorch's CPU allocator; blocks allocated before stay with the allocator they came from.
// Idempotent.
void install_cpu_allocator();

// Bytes of the tensors that live now, as asked for, since install_cpu_allocator().
int64_t cpu_allocated_bytes();
// The most bytes of tensors that lived at once since the last reset.
int64_t cpu_peak_bytes();
void reset_cpu_peak_bytes();
// Gives the pages of freed blocks back to the system.
void release_freed_cpu_memory();

}  // namespace bough
