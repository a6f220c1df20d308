// Takes the place of torch's header.
#pragma once

#include <c10/core/Event.h>
#include <c10/cuda/CUDAStream.h>

namespace at::cuda {
class CUDAEvent {
 public:
  void record(const c10::cuda::CUDAStream& stream) { event_.record(stream.unwrap()); }
  void block(const c10::cuda::CUDAStream& stream) { event_.block(stream.unwrap()); }

 private:
  c10::Event event_{c10::DeviceType::CUDA};
};
}  // namespace at::cuda
