// Work on the current device, recorded once and replayed as a whole: a pass of many small kernels then costs one
// launch.
#pragma once

#include <functional>
#include <memory>

namespace bough {

class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  // Puts the recorded work on the current stream; does not wait for it.
  virtual void replay() = 0;
};

// Runs `work` once, so that what libraries set up at first use is there, then records it without running it. `work` must
// not wait for the device or copy from it, and reads and writes the same addresses at each replay; what it returns in
// tensors stays valid, and is overwritten by the next replay, of this graph or of another. Null where libbough_cuda.so
// is not open.
std::unique_ptr<DeviceGraph> capture_device_graph(const std::function<void()>& work);

}  // namespace bough
