// Takes the place of torch's header: graphs are recordings (recording.h) with libtorch's memory pools.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include "device.h"
#include "recording.h"

enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
using cudaGraph_t = void*;
constexpr int cudaSuccess = 0;

inline int cudaStreamIsCapturing(cudaStream_t /*stream*/, cudaStreamCaptureStatus* status) {
  *status = bough::emulation::recording() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline int cudaStreamEndCapture(cudaStream_t /*stream*/, cudaGraph_t* graph) {
  bough::emulation::recording()->end();
  *graph = nullptr;
  return cudaSuccess;
}
inline int cudaGraphDestroy(cudaGraph_t /*graph*/) {
  return cudaSuccess;
}
inline int cudaGetLastError() {
  return cudaSuccess;
}

namespace at::cuda {

using MempoolId_t = c10::MempoolId_t;
inline MempoolId_t graph_pool_handle() {
  return bough::emulation::new_pool();
}

class CUDAGraph {
 public:
  CUDAGraph() = default;
  CUDAGraph(const CUDAGraph&) = delete;
  CUDAGraph& operator=(const CUDAGraph&) = delete;
  ~CUDAGraph() {
    if (!capture_ended_) return;
    bough::emulation::release_pool(pool_);
    at::getHostAllocator(at::kCUDA)->release_pool(pool_);
  }
  void capture_begin(MempoolId_t pool, cudaStreamCaptureMode /*mode*/) {
    pool_ = pool;
    bough::emulation::begin_pool(pool);
    at::getHostAllocator(at::kCUDA)->begin_allocate_to_pool(pool, [](c10::Stream) { return true; });
    recording_.begin();
  }
  void capture_end() {
    bough::emulation::end_pool(pool_);
    at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(pool_);
    recording_.end();
    capture_ended_ = true;
  }
  void replay() { recording_.replay(bough::emulation::current_stream()); }

 protected:
  bool capture_ended_ = false;

 private:
  MempoolId_t pool_;
  bough::emulation::Recording recording_;
};

}  // namespace at::cuda
