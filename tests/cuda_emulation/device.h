// The emulated device for libtorch: its allocator and its streams. device.cpp registers them, dispatch.cpp
// the ops.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include "host_order.h"

namespace bough::emulation {

constexpr c10::DeviceType kType = c10::DeviceType::CUDA;

c10::DeviceAllocator& allocator();
int current_stream();

// The memory of CUDA graphs. Between begin_pool() and end_pool() the calling thread's allocations come from
// the pool, and tensors that are freed go back to it. The pool is closed when release_pool() was called as
// often as begin_pool().
using PoolId = c10::MempoolId_t;
PoolId new_pool();
void begin_pool(PoolId pool);
void end_pool(PoolId pool);
void release_pool(PoolId pool);

}  // namespace bough::emulation
