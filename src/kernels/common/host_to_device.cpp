#include "kernels/common/host_to_device.h"

#include "base/error.h"

namespace bough {

namespace {
// Each tensor begins at a multiple of this many bytes, so that any kernel may use its widest loads.
constexpr size_t kAlignment = 64;
}  // namespace

void HostToDeviceBatch::add(std::span<const int64_t> values, at::Tensor* to) {
  add(values.data(), std::ssize(values), at::kLong, to);
}

void HostToDeviceBatch::add(std::span<const int32_t> values, at::Tensor* to) {
  add(values.data(), std::ssize(values), at::kInt, to);
}

void HostToDeviceBatch::add(const void* values, int64_t count, at::ScalarType type, at::Tensor* to) {
  const size_t offset = (bytes_.size() + kAlignment - 1) / kAlignment * kAlignment;
  const size_t size = static_cast<size_t>(count) * c10::elementSize(type);
  bytes_.resize(offset + size);
  if (size > 0) std::memcpy(bytes_.data() + offset, values, size);
  items_.push_back({to, type, offset, count});
}

void HostToDeviceBatch::send() {
  if (items_.empty()) return;
  const at::Tensor buffer = upload(bytes_, device_);
  for (const Item& item : items_)
    *item.to = buffer
                   .narrow(0, static_cast<int64_t>(item.offset),
                           item.count * static_cast<int64_t>(c10::elementSize(item.type)))
                   .view(item.type);
  items_.clear();
}

}  // namespace bough
