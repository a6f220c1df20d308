// Scratch that the tensors' allocator hands out: reused from call to call, and counted. Uninitialised, aligned to a cache
// line. What is small and a thread's own is an AlignedBuffer.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace bough {

template <class T>
class Workspace {
 public:
  explicit Workspace(int64_t elements)
      : memory_(at::empty({elements * static_cast<int64_t>(sizeof(T))}, at::kByte)),
        data_(static_cast<T*>(memory_.mutable_data_ptr())) {}
  T* get() const { return data_; }

 private:
  at::Tensor memory_;
  T* data_;
};

}  // namespace bough
