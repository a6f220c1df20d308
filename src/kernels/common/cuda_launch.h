// What the files that bind CUDA kernels to ops (*cuda_ops.cpp) share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "base/error.h"
#include "kernels/common/element_types.h"

namespace bough {

// Makes the tensors' device the current one, and checks that all are there: a kernel that reads an address of
// another memory stops the whole process's use of the device, with an error that names another place.
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
