// Memory of the emulated device.
#pragma once

#include <cstddef>

namespace bough::emulation {

void* allocate_device_memory(size_t bytes);
void free_device_memory(void* data);

}  // namespace bough::emulation
