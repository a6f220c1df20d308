// libbough_cuda.so, which holds the CUDA kernels and brings libtorch_cuda with it: opened when a GPU is asked
// for, so that all else starts fast and runs where there is neither CUDA nor a driver.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>

namespace bough {

// Opens the library beside the program or in ../lib, and registers its kernels. Call it before the first
// tensor: libtorch asks once whether there is CUDA, and keeps the answer. Idempotent. UserError where the
// library is missing or cannot be opened, or where libtorch finds no GPU.
void open_cuda_library();

// The library's file, or an empty path where none is installed.
std::filesystem::path find_cuda_library();

// Work on the current device, recorded once and replayed as a whole: a pass of many small kernels then costs
// one launch.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  // Puts the recorded work on the current stream; does not wait for it.
  virtual void replay() = 0;
};

// Graphs that are replayed one after the other, never beside each other, and share the memory of their
// temporaries. They must not outlive this.
class DeviceGraphs {
 public:
  virtual ~DeviceGraphs() = default;
  // Runs `work` once, so that what libraries set up at first use is there, then records it without running
  // it. `work` must not wait for the device or copy from it, and reads and writes the same addresses at each
  // replay; what it returns in tensors stays valid, and is overwritten by the next replay, of this graph or
  // of another.
  virtual std::unique_ptr<DeviceGraph> capture(const std::function<void()>& work) = 0;
};

// Null where libbough_cuda.so is not open, or BOUGH_CUDA_GRAPHS is 0 in the environment.
std::unique_ptr<DeviceGraphs> make_device_graphs();

}  // namespace bough
