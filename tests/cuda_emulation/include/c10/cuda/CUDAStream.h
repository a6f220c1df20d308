// Takes the place of torch's header: streams of the emulated device (device.cpp).
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

struct CUstream_st;

namespace c10::cuda {

struct CUDAStream {
  c10::Stream value;
  CUstream_st* stream() const { return nullptr; }
};

inline CUDAStream getCurrentCUDAStream() {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
  return {guard.getStream(guard.getDevice())};
}

}  // namespace c10::cuda
