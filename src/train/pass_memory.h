// The memory that plans may use on a GPU if actor.mb_spec.memory is auto.
#pragma once

#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "kernels/common/device.h"
#include "train/parallel_groups.h"

namespace bough {

// The rest is for fragmentation of the allocator, because tensors of different passes have different sizes.
inline constexpr double kShareOfFreeMemory = 0.9;

class PassMemory {
 public:
  using FreeBytes = std::function<int64_t()>;
  // ranks: nullptr if this process trains alone; not owned. free: replaced by tests.
  explicit PassMemory(c10::Device device, const TrainingRanks* ranks, FreeBytes free = nullptr)
      : device_(device), ranks_(ranks), free_(std::move(free)) {
    if (!free_) free_ = [device] { return device_memory(device).free; };
  }

  // Bytes for the passes of any plan: a share of what is free at the first call. Weights, gradients and
  // optimizer states must be allocated by then. nullopt on a CPU: no bound. The ranks of a replica must call
  // it together the first time, because the same plan needs the same number.
  std::optional<int64_t> bytes() const {
    if (device_.is_cpu() || bytes_) return bytes_;
    bytes_ = static_cast<int64_t>(kShareOfFreeMemory * static_cast<double>(free_()));
    if (ranks_ && ranks_->sizes().all() > ranks_->sizes().data)
      bytes_ = std::ranges::min(ranks_->gather(*bytes_));
    return bytes_;
  }

 private:
  c10::Device device_;
  const TrainingRanks* ranks_;
  FreeBytes free_;
  mutable std::optional<int64_t> bytes_;
};

}  // namespace bough
