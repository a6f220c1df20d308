// CUDA graphs behind cuda_library.h. All are recorded on one stream of their own and share one pool of
// memory: they run one after the other, so their temporaries may lie in the same place.
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "base/error.h"
#include "kernels/common/cuda_library.h"

namespace bough {

namespace {

class CudaGraph : public DeviceGraph {
 public:
  explicit CudaGraph(const std::function<void()>& work) {
    static const auto pool = at::cuda::graph_pool_handle();
    static const auto stream = c10::cuda::getStreamFromPool();
    const auto current = c10::cuda::getCurrentCUDAStream();
    BOUGH_CHECK(current.device_index() == stream.device_index(), "graphs of devices ",
                int(current.device_index()), " and ", int(stream.device_index()), " in one process");
    order(current, stream);
    {
      const c10::cuda::CUDAStreamGuard guard(stream);
      work();
      // Other threads may allocate meanwhile.
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

}  // namespace

}  // namespace bough

extern "C" bough::DeviceGraph* bough_capture_cuda_graph(const std::function<void()>& work) {
  return new bough::CudaGraph(work);
}
