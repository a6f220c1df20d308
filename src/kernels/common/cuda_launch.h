// Helpers for the files that bind CUDA kernels to ops (x_cuda_ops.cpp). libbough_cuda.so registers these ops.
// An op without a CUDA kernel runs its reference, written in tensor ops, on the device. Every op runs on the
// current stream of its tensors' device. No op waits for the device.
//
// A launcher, declared in x_cuda.h and defined in a .cu file, takes device pointers and a stream. The caller
// gets launch errors from cudaGetLastError. T is the element type and A the accumulator type: (float, float),
// (BFloat16Bits, float) or (double, double).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <initializer_list>
#include <optional>
#include <vector>

#include "base/error.h"
#include "kernels/common/op.h"

namespace bough {

using Tensor = const at::Tensor&;  // an argument of an op
using OptionalTensor = std::optional<at::Tensor>;

template <class T>
const T* optional_data(const OptionalTensor& tensor) {
  return tensor ? data<T>(*tensor) : nullptr;
}
template <class T>
T* optional_mutable_data(const OptionalTensor& tensor) {
  return tensor ? mutable_data<T>(*tensor) : nullptr;
}

inline std::vector<at::Tensor> with_defined(std::vector<at::Tensor> tensors,
                                            std::initializer_list<OptionalTensor> optional) {
  for (const auto& tensor : optional)
    if (tensor) tensors.push_back(*tensor);
  return tensors;
}

// Until the Launch is destroyed, the device of the first tensor is the current device. Throws InternalError
// if a tensor is on another device or not contiguous. Without the check, a kernel that reads a wrong address
// makes the device unusable for the process, and the error appears at an unrelated place.
class Launch {
 public:
  Launch(const char* op, at::TensorList tensors) : guard_(tensors.front().device()) {
    for (const at::Tensor& tensor : tensors)
      BOUGH_CHECK(tensor.device() == tensors.front().device() && tensor.is_contiguous(), op, ": a tensor of ",
                  tensor.sizes(), " on ", tensor.device().str(),
                  tensor.is_contiguous() ? "" : ", not contiguous", "; expected contiguous ones on ",
                  tensors.front().device().str());
    stream_ = c10::cuda::getCurrentCUDAStream().stream();
  }

  CudaStream stream() const { return stream_; }

 private:
  c10::cuda::CUDAGuard guard_;
  CudaStream stream_;
};

}  // namespace bough
