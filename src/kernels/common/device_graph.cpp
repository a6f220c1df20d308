#include "kernels/common/device_graph.h"

#include <dlfcn.h>

namespace bough {

std::unique_ptr<DeviceGraph> capture_device_graph(const std::function<void()>& work) {
  // In device_graph_cuda_ops.cpp; the library is opened for all of the process (cuda_library.cpp).
  using Capture = DeviceGraph*(const std::function<void()>&);
  auto* const capture = reinterpret_cast<Capture*>(dlsym(RTLD_DEFAULT, "bough_capture_cuda_graph"));
  return std::unique_ptr<DeviceGraph>(capture ? capture(work) : nullptr);
}

}  // namespace bough
