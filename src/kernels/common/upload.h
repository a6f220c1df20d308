// Numbers that the host has made for kernels of a device to read. A plain copy would make the host wait for
// all that the device still has to do; these are of memory that the device reads by itself, and the host goes
// on.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace bough {

// A tensor [values.size()] on `device`. The host does not wait: a GPU gets them through pinned memory, which
// libtorch keeps until the copy is done.
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

// Integers for a pass, all of which go over in one copy.
class Upload {
 public:
  explicit Upload(at::Device device) : device_(device) {}

  at::Device device() const { return device_; }

  // Copies the values; send() makes `*to`, which must live until then, a tensor of them.
  void add(std::span<const int64_t> values, at::Tensor* to);
  void add(std::span<const int32_t> values, at::Tensor* to);

  // The tensors are parts of one buffer. On a GPU they are there before whatever the current stream is asked
  // for next. At most once; does nothing where nothing was added.
  void send();

 private:
  struct Item {
    at::Tensor* to;
    at::ScalarType type;
    size_t offset;  // of bytes_
    int64_t count;
  };
  void add(const void* values, int64_t count, at::ScalarType type, at::Tensor* to);

  at::Device device_;
  std::vector<uint8_t> bytes_;
  std::vector<Item> items_;
};

}  // namespace bough
