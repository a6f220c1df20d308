// Memory of the emulated device. Under AddressSanitizer an access beyond an allocation or beyond the shared
// memory of a block is an error.
//
// Fresh memory holds a fill that is NaN in fp32 and bf16, and a negative integer. Words that equal the fill
// count as never written; kOtherFill (NaN, too; positive as an integer) takes their place in a repeated
// launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace bough::emulation {

constexpr uint32_t kFill = 0xFFF7FFC3, kOtherFill = 0x7FD57FA9;

void* allocate_device_memory(size_t bytes);
void free_device_memory(void* data);

// Copies of all allocations.
using DeviceMemory = std::map<char*, std::vector<char>>;
DeviceMemory save_device_memory();
// Writes the copies back, and `fill` where they hold kFill.
void restore_device_memory(const DeviceMemory& memory, uint32_t fill);
// Compares the allocations with the copies; `fill` now stands where the copies hold kFill.
bool device_memory_equals(const DeviceMemory& memory, uint32_t fill);

// Returns the dynamic shared memory of the next block, filled. Fills static shared memory as well.
char* begin_shared_memory(int64_t bytes, uint32_t fill);

}  // namespace bough::emulation
