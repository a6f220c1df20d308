// Queries of a device: synchronization, memory and name. They use only libtorch's interfaces, so that no CUDA
// headers are needed.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "base/clock.h"

namespace bough {

// Waits until all work on the device is done; returns at once for a CPU. GPU work is asynchronous: call this
// before you read a clock, or the time covers only the launches.
void synchronize(c10::Device device);

// Waits until the work that this thread has queued on its current stream is done; returns at once for a CPU.
void synchronize_stream(c10::Device device);

// A clock for times of work on a device: now() first waits until the work that this thread queued is done.
class DeviceClock final : public Clock {
 public:
  // `clock` must outlive this object. wait: replaced by tests.
  DeviceClock(Clock& clock, c10::Device device, std::function<void()> wait = nullptr)
      : clock_(clock), wait_(std::move(wait)) {
    if (!wait_) wait_ = [device] { synchronize_stream(device); };
  }
  Time now() const override {
    wait_();
    return clock_.now();
  }
  void sleep_until(Time time) override { clock_.sleep_until(time); }

 private:
  Clock& clock_;
  std::function<void()> wait_;
};

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

// The most bytes in use so far: on a GPU those of tensors, since the last PeakBytes; on a CPU the largest
// resident set of the process.
int64_t peak_memory_bytes(c10::Device device);

// Returns the driver's name of a GPU, for instance "NVIDIA H100 80GB HBM3", or "cpu".
std::string device_name(c10::Device device);

// Returns a GPU's compute capability without the dot, for instance 90 for an H100. 0 for a CPU.
int compute_capability(c10::Device device);

}  // namespace bough
