// Copies numbers from the host to a device. A plain copy would make the host wait for all earlier work of the
// device. These copies go through pinned memory, and the host continues at once.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace bough {

// Returns a tensor [values.size()] on `device`, without waiting. libtorch keeps the pinned memory until the
// copy is done.
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

// The integers of a pass, which are copied to the device together.
class HostToDeviceBatch {
 public:
  explicit HostToDeviceBatch(at::Device device) : device_(device) {}

  at::Device device() const { return device_; }

  // Stores a copy of the values. send() sets `*to` to a tensor of them; `to` must be valid until send().
  void add(std::span<const int64_t> values, at::Tensor* to);
  void add(std::span<const int32_t> values, at::Tensor* to);

  // Copies all values to the device and sets the tensors, which are views of one buffer. On a GPU, later
  // work of the current stream sees the values. Call at most once. Does nothing if no values were added.
  void send();

 private:
  struct Item {
    at::Tensor* to;
    at::ScalarType type;
    size_t offset;  // in bytes_
    int64_t count;
  };
  void add(const void* values, int64_t count, at::ScalarType type, at::Tensor* to);

  at::Device device_;
  std::vector<uint8_t> bytes_;
  std::vector<Item> items_;
};

}  // namespace bough
