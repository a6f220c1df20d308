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

void add(at::Tensor& sum, const at::Tensor& more) {
  sum = sum.defined() ? sum + more : more;
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
      add(counts_->records, has_record_T.sum());
      add(counts_->different, different_T.sum());
      if (index == 0) add(counts_->tokens, has_record_T.sum());
      const at::Tensor before_T = index == 0 ? at::zeros_like(different_T) : different_T_;
      different_T_ = before_T.logical_or(different_T);
      add(counts_->different_tokens, different_T_.logical_xor(before_T).sum());
    }
    used_TK = at::where(has_record_T.unsqueeze(1), recorded_TK, chosen_TK);
  }
  if (counts_) {
    counts_->loads.resize(std::max(counts_->loads.size(), static_cast<size_t>(index) + 1));
    const at::Tensor used_P = used_TK.flatten();
    add(counts_->loads[static_cast<size_t>(index)],
        at::zeros({logits_TE.size(1)}, used_P.options()).scatter_add_(0, used_P, at::ones_like(used_P)));
  }
  return used_TK;
}

std::vector<at::Tensor> ExpertRoutes::used_of(int64_t num_tokens) const {
  std::vector<at::Tensor> layers = used_;
  for (at::Tensor& used_TK : layers)
    if (used_TK.defined()) used_TK = used_TK.narrow(0, 0, num_tokens);
  return layers;
}

at::Tensor ExpertRoutes::used_TLK() const {
  std::vector<at::Tensor> layers;
  for (const at::Tensor& used_TK : used_)
    if (used_TK.defined()) layers.push_back(used_TK);
  return layers.empty() ? at::Tensor() : at::stack(layers, 1).cpu();
}

}  // namespace bough
