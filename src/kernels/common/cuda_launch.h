// Helper for the files that bind CUDA kernels to ops (*cuda_ops.cpp).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "base/error.h"
#include "kernels/common/element_types.h"

namespace bough {

// Makes the tensors' device the current device while it lives. Throws InternalError if a tensor is on another
// device or not contiguous. Without the check, a kernel that reads a wrong address makes the device unusable
// for the process, and the error appears at an unrelated place.
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
