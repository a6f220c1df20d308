#include "models/expert_routes.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/error.h"
#include "kernels/experts/experts.h"

namespace bough {

namespace {

// Returns bool [T]: whether the rows of two [T, K] tensors are the same set.
at::Tensor equal_sets(const at::Tensor& a_TK, const at::Tensor& b_TK) {
  return std::get<0>(a_TK.sort(1)).eq(std::get<0>(b_TK.sort(1))).all(1);
}

int64_t number_of(const at::Tensor& mask_T) {
  return mask_T.sum().item<int64_t>();
}

}  // namespace

at::Tensor ExpertRoutes::route(int64_t layer, const at::Tensor& logits_TE, int64_t num_chosen) {
  used_.resize(std::max(used_.size(), static_cast<size_t>(layer) + 1));
  at::Tensor& used_TK = used_[static_cast<size_t>(layer)];
  if (used_TK.defined()) return used_TK;
  const int64_t index = std::ranges::count_if(used_, &at::Tensor::defined);  // among the layers with experts
  const at::Tensor chosen_TK = choose_experts(logits_TE, num_chosen);
  used_TK = chosen_TK;
  if (recorded_TLK_.defined()) {
    BOUGH_CHECK(index < recorded_TLK_.size(1) && num_chosen == recorded_TLK_.size(2), "recorded are ",
                recorded_TLK_.size(2), " experts in each of ", recorded_TLK_.size(1),
                " layers, but the model chooses ", num_chosen, " in layer ", layer);
    const at::Tensor recorded_TK = recorded_TLK_.select(1, index);
    const at::Tensor has_record_T = recorded_TK.select(1, 0).ge(0);
    if (counts_) {
      const at::Tensor different_T =
          equal_sets(chosen_TK, recorded_TK).logical_not_().logical_and_(has_record_T);
      counts_->records += number_of(has_record_T);
      counts_->different += number_of(different_T);
      if (index == 0) counts_->tokens += number_of(has_record_T);
      const at::Tensor before_T = index == 0 ? at::zeros_like(different_T) : different_T_;
      different_T_ = before_T.logical_or(different_T);
      counts_->different_tokens += number_of(different_T_) - number_of(before_T);
    }
    used_TK = at::where(has_record_T.unsqueeze(1), recorded_TK, chosen_TK);
  }
  if (counts_) {
    counts_->loads.resize(std::max(counts_->loads.size(), static_cast<size_t>(index) + 1));
    at::Tensor& load_E = counts_->loads[static_cast<size_t>(index)];
    const at::Tensor added_E = at::bincount(used_TK.flatten().cpu(), {}, logits_TE.size(1));
    load_E = load_E.defined() ? load_E + added_E : added_E;
  }
  return used_TK;
}

at::Tensor ExpertRoutes::used_TLK() const {
  std::vector<at::Tensor> layers;
  for (const at::Tensor& used_TK : used_)
    if (used_TK.defined()) layers.push_back(used_TK);
  return layers.empty() ? at::Tensor() : at::stack(layers, 1).cpu();
}

}  // namespace bough
