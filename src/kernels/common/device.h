// What a device is asked besides computing: whether it is done, how much memory it has, what it is called.
// Through libtorch's own interfaces, so that nothing here needs CUDA's headers.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace bough {

// Returns when all that was asked of the device is done; at once for a CPU. Work on a GPU runs beside the
// thread that asks for it: a clock read without this measures the asking.
void synchronize(c10::Device device);

struct DeviceMemory {
  int64_t free = 0;   // bytes that this process may still fill with tensors
  int64_t total = 0;  // bytes of the device
};
// A GPU's free bytes are what no process holds and what libtorch's allocator keeps for reuse; a CPU's are
// what the system calls available.
DeviceMemory device_memory(c10::Device device);

// The most bytes of tensors on the device above those that lived when this was made. One at a time a device:
// libtorch keeps one peak.
class PeakBytes {
 public:
  explicit PeakBytes(c10::Device device);
  int64_t bytes() const;

 private:
  c10::Device device_;
  int64_t before_;
};

// As its driver names a GPU, "NVIDIA H100 80GB HBM3"; "cpu".
std::string device_name(c10::Device device);

}  // namespace bough
