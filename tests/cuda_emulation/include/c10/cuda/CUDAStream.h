// Takes the place of torch's header: streams of the emulated device (device.cpp).
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "block.h"

namespace c10::cuda {

class CUDAStream {
 public:
  explicit CUDAStream(c10::Stream stream) : stream_(stream) {}
  c10::Stream unwrap() const { return stream_; }
  operator c10::Stream() const { return stream_; }
  c10::DeviceIndex device_index() const { return stream_.device_index(); }
  cudaStream_t stream() const { return reinterpret_cast<cudaStream_t>(stream_.id()); }
  operator cudaStream_t() const { return stream(); }

 private:
  c10::Stream stream_;
};

inline CUDAStream getCurrentCUDAStream() {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  return CUDAStream(guard.getStream(guard.getDevice()));
}

inline CUDAStream getStreamFromPool(bool high_priority = false) {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  return CUDAStream(guard.getStreamFromGlobalPool(guard.getDevice(), high_priority));
}

}  // namespace c10::cuda
