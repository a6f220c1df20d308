// Functions that cuda_library.h and device.h find by name, and CUDA graphs. All graphs are recorded on one
// separate stream. The graphs of one DeviceGraphs run one after the other, so they share a memory pool, and
// their temporaries may use the same addresses.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdio>

#include "base/error.h"
#include "kernels/common/cuda_library.h"

namespace bough {

namespace {

// Recordings that were given up and still hold a memory pool open: of device memory, of pinned host memory.
struct Discarded {
  int64_t device = 0, host = 0;
};

at::HostAllocator& pinned_memory() {
  return *at::getHostAllocator(at::kCUDA);
}

// A graph that can be given up while it is recorded. CUDAGraph itself ends a recording only if the stream can
// end it without an error. Otherwise both allocators would stay in the graph's memory pools.
class RecordedGraph final : public at::cuda::CUDAGraph, public StreamRecorder {
 public:
  RecordedGraph(at::cuda::MempoolId_t pool, c10::cuda::CUDAStream stream, Discarded& discarded)
      : pool_id_(pool), stream_(stream), discarded_(discarded) {}

  // Other threads may allocate during the capture.
  void begin() override { capture_begin(pool_id_, cudaStreamCaptureModeThreadLocal); }
  void end() override { capture_end(); }

  void discard() noexcept override {
    // If the recording has ended and making the graph failed, the destructor does what is left.
    if (capture_ended_) return;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaGraph_t recorded = nullptr;
    if (cudaStreamIsCapturing(stream_, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone)
      cudaStreamEndCapture(stream_,
                           &recorded);  // an error says that the recording is invalid, which is known
    if (recorded) cudaGraphDestroy(recorded);
    cudaGetLastError();  // so that the next call does not report the error
    leave([&] { c10::cuda::CUDACachingAllocator::endAllocateToPool(stream_.device_index(), pool_id_); },
          discarded_.device);
    leave([&] { pinned_memory().end_allocate_to_pool(pool_id_); }, discarded_.host);
  }

 private:
  static void leave(const std::function<void()>& end, int64_t& count) noexcept {
    try {
      end();
      ++count;
    } catch (const std::exception&) {  // begin() failed before the allocator entered the pool
    }
  }

  const at::cuda::MempoolId_t pool_id_;
  const c10::cuda::CUDAStream stream_;
  Discarded& discarded_;
};

class CudaGraph : public DeviceGraph {
 public:
  CudaGraph(const std::function<void()>& work, at::cuda::MempoolId_t pool, Discarded& discarded)
      : graph_(pool, recording_stream(), discarded) {
    const auto stream = recording_stream();
    const auto current = c10::cuda::getCurrentCUDAStream();
    BOUGH_CHECK(current.device_index() == stream.device_index(),
                "CUDA graphs: expected one device per process, got devices ", int(current.device_index()),
                " and ", int(stream.device_index()));
    order(current, stream);
    try {
      const c10::cuda::CUDAStreamGuard guard(stream);
      record(graph_, work);
    } catch (...) {
      order(stream, current);  // the work that ran for setup, or its part before the exception
      throw;
    }
    order(stream, current);
  }
  void replay() override { graph_.replay(); }

 private:
  static c10::cuda::CUDAStream recording_stream() {
    // Kernels of a graph keep the priority of the stream on which they were recorded.
    static const auto stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/true);
    return stream;
  }

  static void order(const c10::cuda::CUDAStream& first, const c10::cuda::CUDAStream& second) {
    at::cuda::CUDAEvent event;
    event.record(first);
    event.block(second);
  }

  RecordedGraph graph_;
};

// Each object has a memory pool of its own. libtorch closes a pool when the last graph recorded into it is
// destroyed, and no graph can be recorded into a closed pool.
class CudaGraphs : public DeviceGraphs {
 public:
  ~CudaGraphs() override {
    for (; discarded_.device > 0; --discarded_.device)
      c10::cuda::CUDACachingAllocator::releasePool(c10::cuda::current_device(), pool_);
    for (; discarded_.host > 0; --discarded_.host) pinned_memory().release_pool(pool_);
  }
  std::unique_ptr<DeviceGraph> capture(const std::function<void()>& work) override {
    return std::make_unique<CudaGraph>(work, pool_, discarded_);
  }

 private:
  const at::cuda::MempoolId_t pool_ = at::cuda::graph_pool_handle();
  Discarded discarded_;
};

}  // namespace

}  // namespace bough

extern "C" bough::DeviceGraphs* bough_cuda_graphs() {
  return new bough::CudaGraphs();
}

extern "C" void bough_cuda_device_name(int device, char* name, size_t size) {
  std::snprintf(name, size, "%s", at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(device))->name);
}

extern "C" int bough_cuda_capability(int device) {
  const auto* const properties = at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(device));
  return 10 * properties->major + properties->minor;
}
