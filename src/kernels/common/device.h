// Queries of a device: synchronization, memory and name. They use only libtorch's interfaces, so that no CUDA
// headers are needed.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace bough {

// Waits until all work on the device is done; returns at once for a CPU. GPU work is asynchronous: call this
// before you read a clock, or the time covers only the launches.
void synchronize(c10::Device device);

struct DeviceMemory {
  int64_t free = 0;   // bytes that this process can still allocate for tensors
  int64_t total = 0;  // bytes of the device
};
// On a GPU, free bytes include those that libtorch's allocator keeps for reuse. On a CPU, they are
// those of host_memory() (base/memory.h), which knows the limits of containers, and `total` is their limit.
DeviceMemory device_memory(c10::Device device);

// The peak bytes of tensors on the device since construction, minus the bytes at construction. Only one
// object per device may exist at a time, because libtorch keeps one peak.
class PeakBytes {
 public:
  explicit PeakBytes(c10::Device device);
  int64_t bytes() const;

 private:
  c10::Device device_;
  int64_t before_;
};

// Returns the driver's name of a GPU, for instance "NVIDIA H100 80GB HBM3", or "cpu".
std::string device_name(c10::Device device);

}  // namespace bough
