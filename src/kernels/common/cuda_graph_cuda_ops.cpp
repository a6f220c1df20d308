// Functions that cuda_library.h and device.h find by name, and CUDA graphs. All graphs are recorded on one
// separate stream. The graphs of one DeviceGraphs run one after the other, so they share a memory pool, and
// their temporaries may use the same addresses.
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdio>

#include "base/error.h"
#include "kernels/common/cuda_library.h"

namespace bough {

namespace {

class CudaGraph : public DeviceGraph {
 public:
  CudaGraph(const std::function<void()>& work, at::cuda::MempoolId_t pool) {
    static const auto stream = c10::cuda::getStreamFromPool();
    const auto current = c10::cuda::getCurrentCUDAStream();
    BOUGH_CHECK(current.device_index() == stream.device_index(),
                "CUDA graphs: expected one device per process, got devices ", int(current.device_index()),
                " and ", int(stream.device_index()));
    order(current, stream);
    {
      const c10::cuda::CUDAStreamGuard guard(stream);
      work();
      // Other threads may allocate during the capture.
      graph_.capture_begin(pool, cudaStreamCaptureModeThreadLocal);
      work();
      graph_.capture_end();
    }
    order(stream, current);
  }
  void replay() override { graph_.replay(); }

 private:
  static void order(const c10::cuda::CUDAStream& first, const c10::cuda::CUDAStream& second) {
    at::cuda::CUDAEvent event;
    event.record(first);
    event.block(second);
  }

  at::cuda::CUDAGraph graph_;
};

// Each object has a memory pool of its own. libtorch closes a pool when the last graph recorded into it is
// destroyed, and no graph can be recorded into a closed pool.
class CudaGraphs : public DeviceGraphs {
 public:
  std::unique_ptr<DeviceGraph> capture(const std::function<void()>& work) override {
    return std::make_unique<CudaGraph>(work, pool_);
  }

 private:
  const at::cuda::MempoolId_t pool_ = at::cuda::graph_pool_handle();
};

}  // namespace

}  // namespace bough

extern "C" bough::DeviceGraphs* bough_cuda_graphs() {
  return new bough::CudaGraphs();
}

extern "C" void bough_cuda_device_name(int device, char* name, size_t size) {
  std::snprintf(name, size, "%s", at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(device))->name);
}
