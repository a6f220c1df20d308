#include "rollout/copied_weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <utility>

#include "base/error.h"

namespace bough {

std::unique_ptr<Model> copy_of(const Model& model) {
  auto copy = model.share();
  for (Parameter* parameter : copy->parameters()) {
    parameter->value = parameter->value.clone();
    parameter->main_grad = at::Tensor();
    if (parameter->quantized()) parameter->scale = parameter->scale.clone();
  }
  return copy;
}

CopiedWeights::CopiedWeights(const Model& trained, Model& generating, bool in_place)
    : generating_(generating),
      in_place_(in_place),
      trained_view_(trained.share()),
      parameters_(generating.parameters()) {
  for (Parameter* parameter : trained_view_->parameters()) {
    BOUGH_CHECK(!parameter->quantized(), "quantized weights are not trained");
    trained_.push_back(parameter);
    snapshot_.push_back(at::empty_like(parameter->value));
  }
  BOUGH_CHECK(trained_.size() == parameters_.size(), trained_.size(), " parameters trained, ",
              parameters_.size(), " generating");
}

void CopiedWeights::publish(int32_t version) {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < trained_.size(); ++i) snapshot_[i].copy_(trained_[i]->value);
  version_ = version;
  has_new_.store(true);
}

std::optional<WeightUpdate> CopiedWeights::take() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || !has_new_.exchange(false)) return std::nullopt;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (in_place_) parameters_[i]->value.copy_(snapshot_[i]);
    else std::swap(parameters_[i]->value, snapshot_[i]);
  }
  return WeightUpdate{.version = version_, .model = &generating_};
}

}  // namespace bough
