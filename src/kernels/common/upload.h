// Integers that the host has made for kernels of a device to read. Each copy by itself would make the host
// wait for all that the device still has to do; all of a pass go over in one copy, of memory that the device
// reads by itself, and the host goes on.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace bough {

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
  std::vector<std::byte> bytes_;
  std::vector<Item> items_;
};

}  // namespace bough
