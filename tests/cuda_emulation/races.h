// The race detector: memory whose accesses by kernels are checked against the barriers (races.cpp). Only
// the variant of the emulation that is compiled with BOUGH_EMULATION_RACES has it.
#pragma once

#include <cstddef>

namespace bough::emulation {

// Returns device memory whose accesses are checked.
void* allocate_checked_memory(size_t bytes);
void free_checked_memory(void* data, size_t bytes);
// Accesses to this shared memory are checked from now on.
void check_shared_memory(char* begin, size_t bytes);

}  // namespace bough::emulation
