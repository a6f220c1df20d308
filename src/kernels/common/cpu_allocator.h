// The CPU allocator of all tensors: keeps freed blocks for the next pass, and counts.
//
// A training pass allocates and frees the same sizes again and again; with plain malloc each large one is mapped
// and its pages faulted in anew, a sixth to a quarter of a step. Freed blocks of 64 KiB and more are kept by size
// class (eight classes a power of two, so at most an eighth is wasted) and handed out again, to requests of the five
// classes below, too. Passes of many sizes would keep blocks for each: those kept longest are freed before a new one
// would take what is mapped past four thirds of the live blocks' peak.
#pragma once

#include <cstdint>

namespace bough {

// Makes it libtorch's CPU allocator; blocks allocated before stay with the allocator they came from. Idempotent.
void install_cpu_allocator();

// Bytes of the tensors that live now, as asked for, since install_cpu_allocator().
int64_t cpu_allocated_bytes();
// The most since the last reset.
int64_t cpu_peak_bytes();
void reset_cpu_peak_bytes();
// Gives kept blocks back to the system.
void release_kept_cpu_blocks();

}  // namespace bough
