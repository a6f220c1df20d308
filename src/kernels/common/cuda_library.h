// libbough_cuda.so has the CUDA kernels and loads libtorch_cuda. It is opened only if a GPU is used. Programs
// that use no GPU therefore start faster, and run on machines without CUDA or a driver.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bough {

// Opens the library in the program's folder or in ../lib, and registers its kernels, except those that are
// left out (kLeaveOutVariable). Call it before the
// first tensor is created, because libtorch looks for CUDA only once. Idempotent. Throws UserError if the
// library is missing, cannot be opened or is of another build, or if libtorch finds no GPU.
// sets_allocator: false leaves the settings of libtorch's allocator as they are, for a process that is not
// ours (Python).
void open_cuda_library(bool sets_allocator = true);

// Whether this process has opened the library, also if libtorch then found no GPU.
bool cuda_library_is_open();

// Lets libtorch's allocator of GPU memory grow segments in place, unless the user has set
// PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF. Each pass has a new size, and between fixed segments memory
// is lost. The memory pools of CUDA graphs use such segments, too: libtorch excludes only pools with an
// allocator of their own (DeviceCachingAllocator::malloc in c10/cuda/CUDACachingAllocator.cpp).
// open_cuda_library() calls it before the first allocation.
void set_expandable_segments();

// Returns the library's file, or an empty path if it is not installed.
std::filesystem::path find_cuda_library();

// Kernels that this process does not use, although the library has them: the environment variable
// BOUGH_LEAVE_OUT_KERNELS lists their names, with commas between. The self-test (cli/self_tests.h) adds the
// kernels that it found faulty. The variable must not change after open_cuda_library().
//
// The names: an op such as rms_norm_forward; with "/plain" behind an op, its kernel without tensor cores,
// which takes the place of the fastest one; flash_segments (vendor_attends_runs()); cuda_graphs
// (make_device_graphs()). kernels/self_test has the list.
inline constexpr const char* kLeaveOutVariable = "BOUGH_LEAVE_OUT_KERNELS";
std::vector<std::string> left_out_kernels();
bool is_left_out(std::string_view kernel);

// Whether the library is open and registered a kernel for the op, such as "bough::paged_attention_".
// Otherwise the op's reference runs on CUDA.
bool has_cuda_kernel(const char* op);

// The build id of libbough_kernels.so (base/build_id.h).
const char* kernels_build_id();

// A CUDA graph: work on the current device that is recorded once and replayed as a whole. A pass of many
// small kernels then costs one launch.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  // Launches the recorded work on the current stream; does not wait for it.
  virtual void replay() = 0;
};

// Graphs that share the memory of their temporaries. They are replayed one after the other, never at the
// same time. A graph must not outlive its DeviceGraphs.
class DeviceGraphs {
 public:
  virtual ~DeviceGraphs() = default;
  // Runs `work` once, so that libraries do their setup of the first use, then records it without running it.
  // `work` must not wait for the device or copy from it. A replay reads and writes the same addresses as the
  // recording. Result tensors stay valid until the next replay of any of the graphs overwrites them.
  virtual std::unique_ptr<DeviceGraph> capture(const std::function<void()>& work) = 0;
};

// false if the environment variable BOUGH_CUDA_GRAPHS is 0, or if cuda_graphs is left out.
bool wants_device_graphs();
// Returns nullptr if libbough_cuda.so is not open, or without wants_device_graphs().
std::unique_ptr<DeviceGraphs> make_device_graphs();

// The calls with which a stream is recorded. For capture() of DeviceGraphs.
class StreamRecorder {
 public:
  virtual ~StreamRecorder() = default;
  virtual void begin() = 0;
  virtual void end() = 0;
  // Ends a recording that failed in begin(), in the work or in end(), and drops it. The stream and the memory
  // pool can be used as before. Does not throw.
  virtual void discard() noexcept = 0;
};
// Runs `work` once, then records it. If anything throws, the stream does not stay recording, and the
// exception is rethrown.
void record(StreamRecorder& recorder, const std::function<void()>& work);

// Graphs for an owner that also works without them.
class OptionalGraphs {
 public:
  using Maker = std::function<std::unique_ptr<DeviceGraphs>()>;
  explicit OptionalGraphs(Maker make = make_device_graphs) : make_(std::move(make)) {}

  // Like DeviceGraphs::capture(). Returns nullptr if the device has no graphs, or if this or an earlier
  // capture threw. The first exception is logged as a warning.
  std::unique_ptr<DeviceGraph> capture(const std::function<void()>& work);

 private:
  Maker make_;  // empty after its call
  std::unique_ptr<DeviceGraphs> graphs_;
  bool has_failed_ = false;
};

}  // namespace bough
