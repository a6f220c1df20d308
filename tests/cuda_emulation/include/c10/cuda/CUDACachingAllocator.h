// Takes the place of torch's header: the memory pools of graphs (device.cpp).
#pragma once

#include "device.h"

namespace c10::cuda::CUDACachingAllocator {
inline void endAllocateToPool(c10::DeviceIndex /*device*/, c10::MempoolId_t pool) {
  bough::emulation::end_pool(pool);
}
inline void releasePool(c10::DeviceIndex /*device*/, c10::MempoolId_t pool) {
  bough::emulation::release_pool(pool);
}
}  // namespace c10::cuda::CUDACachingAllocator
