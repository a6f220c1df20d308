#include "rollout/copied_weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "kernels/common/device.h"
#include "models/lora.h"

namespace bough {

// Adapters are in trained_parameters() but not in parameters().
std::vector<Parameter*> changing_parameters(Model& model, Changing changing) {
  std::vector<Parameter*> parameters = model.trained_parameters();
  for (Parameter* frozen : frozen_adapters(model)) parameters.push_back(frozen);
  if (changing == Changing::kTrained) return parameters;
  const std::vector<Parameter*> all = model.parameters();
  if (!parameters.empty() && std::find(all.begin(), all.end(), parameters[0]) != all.end()) return all;
  parameters.insert(parameters.begin(), all.begin(), all.end());
  return parameters;
}

std::unique_ptr<Model> copy_of(const Model& model, Changing changing) {
  auto copy = model.share();
  for (Parameter* parameter : changing_parameters(*copy, changing)) {
    parameter->value = parameter->value.clone();
    parameter->main_grad = at::Tensor();
    if (parameter->quantized()) parameter->scale = parameter->scale.clone();
  }
  return copy;
}

uint64_t checksum_of(const at::Tensor& tensor) {
  const at::Tensor whole = tensor.contiguous();
  if (!whole.is_cpu())  // sums the bits on the device, because a transfer to the host is far slower
    return static_cast<uint64_t>(
        whole.view(whole.element_size() == 2   ? at::kShort
                   : whole.element_size() == 4 ? at::kInt
                                               : at::kLong)
            .sum(at::kLong)
            .item<int64_t>());
  // Four independent multiply-add chains, so that memory bandwidth is the limit.
  const auto* words = static_cast<const unsigned char*>(whole.const_data_ptr());
  const size_t size = whole.nbytes();
  constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;  // odd, from the golden ratio
  uint64_t lanes[4] = {1, 2, 3, 4};
  size_t i = 0;
  for (; i + 32 <= size; i += 32)
    for (size_t lane = 0; lane < 4; ++lane) {
      uint64_t word;
      std::memcpy(&word, words + i + 8 * lane, 8);
      lanes[lane] = lanes[lane] * kFactor + word;
    }
  uint64_t sum = size;
  for (; i < size; ++i) sum = sum * kFactor + words[i];
  for (const uint64_t lane : lanes) sum = sum * kFactor + lane;
  return sum;
}

namespace {
int64_t num_bytes(const at::Tensor& value) {
  return static_cast<int64_t>(value.nbytes());
}
int64_t num_bytes(const std::vector<const Parameter*>& parameters) {
  int64_t bytes = 0;
  for (const Parameter* parameter : parameters) bytes += num_bytes(parameter->value);
  return bytes;
}
}  // namespace

CopiedWeights::CopiedWeights(const Model& trained, Model& generating, bool in_place, Changing changing)
    : generating_(generating), in_place_(in_place), trained_view_(trained.share()) {
  const MutexLock lock(mutex_);
  collect(generating, changing);
  if (trained.device().is_cpu()) {
    for (const Parameter* parameter : trained_) snapshot_.push_back(at::empty_like(parameter->value));
    return;
  }
  BOUGH_CHECK(in_place, "weights on ", trained.device().str(), " are taken in place");
  on_host_ = std::make_unique<PinnedPieces>(num_bytes(trained_));
}

CopiedWeights::CopiedWeights(const Model& trained, Model& generating, Changing changing,
                             const std::function<at::Tensor(int64_t)>& allocate, int64_t piece_bytes)
    : generating_(generating), in_place_(true), trained_view_(trained.share()) {
  const MutexLock lock(mutex_);
  collect(generating, changing);
  on_host_ = std::make_unique<PinnedPieces>(num_bytes(trained_), allocate, piece_bytes);
}

void CopiedWeights::collect(Model& generating, Changing changing) {
  parameters_ = changing_parameters(generating, changing);
  for (Parameter* parameter : changing_parameters(*trained_view_, changing)) {
    BOUGH_CHECK(!parameter->quantized(), "quantized weights cannot be trained");
    trained_.push_back(parameter);
  }
  BOUGH_CHECK(trained_.size() == parameters_.size(), "got ", trained_.size(), " trained and ",
              parameters_.size(), " generating parameters");
}

void CopiedWeights::publish(int32_t version) {
  const at::NoGradGuard no_grad;
  const MutexLock lock(mutex_);
  checksums_.clear();
  int64_t offset = 0;
  for (size_t i = 0; i < trained_.size(); ++i) {
    const at::Tensor& value = trained_[i]->value;
    if (on_host_) on_host_->store(std::exchange(offset, offset + num_bytes(value)), value);
    else snapshot_[i].copy_(value);
    checksums_.push_back(checksum_of(value));
  }
  synchronize_stream(
      generating_.device());  // the snapshot is complete before the trainer changes the weights
  version_ = version;
  has_new_.store(true);
}

std::optional<WeightUpdate> CopiedWeights::take() {
  if (!mutex_.try_lock()) return std::nullopt;
  const MutexLock lock(mutex_, std::adopt_lock);
  if (!has_new_.exchange(false)) return std::nullopt;
  const at::NoGradGuard no_grad;
  int64_t offset = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& value = parameters_[i]->value;
    if (on_host_) on_host_->load(std::exchange(offset, offset + num_bytes(value)), value);
    else if (in_place_) value.copy_(snapshot_[i]);
    else std::swap(value, snapshot_[i]);
    BOUGH_CHECK(checksum_of(value) == checksums_[i], "publication of version ", version_,
                ": the engine's weights differ from the trainer's, parameter ", i, " of ",
                parameters_.size());
  }
  synchronize_stream(generating_.device());  // publish() may write the next snapshot
  return WeightUpdate{.version = version_, .model = &generating_};
}

}  // namespace bough
