// Copies of numbers from the host to a device without waiting: a GPU gets them through pinned memory, which
// libtorch keeps until the copy is done.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <span>

namespace bough {

// Returns a tensor [values.size()] on `device`.
template <class T>
at::Tensor upload(std::span<const T> values, at::Device device) {
  const auto options = at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value);
  at::Tensor host = at::empty({static_cast<int64_t>(values.size())}, options.pinned_memory(device.is_cuda()));
  if (!values.empty()) std::memcpy(host.mutable_data_ptr(), values.data(), values.size_bytes());
  return device.is_cpu() ? host : host.to(device, /*non_blocking=*/true);
}
template <class T>
at::Tensor upload(const std::vector<T>& values, at::Device device) {
  return upload(std::span<const T>(values), device);
}

}  // namespace bough
