#include "algo/policy_rows.h"

#include <ATen/ops/bincount.h>
#include <ATen/ops/full.h>
#include <ATen/ops/unique_consecutive.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace bough {

at::Tensor log_ratio(const at::Tensor& log_a_R, const at::Tensor& log_b_R) {
  return log_a_R.clamp_min(kLogProbFloor)
      .sub(log_b_R.clamp_min(kLogProbFloor))
      .clamp(-kMaxLogRatio, kMaxLogRatio);
}

Sequences::Sequences(const at::Tensor& sequences_R) : index_R_(sequences_R) {
  if (sequences_R.numel() == 0) return;
  const auto [values, index_R, counts] = at::unique_consecutive(sequences_R, /*return_inverse=*/true);
  index_R_ = index_R;
  num_sequences_ = values.numel();
}

at::Tensor Sequences::sum(const at::Tensor& x_R) const {
  return at::zeros({num_sequences_}, x_R.options()).index_add(0, index_R_, x_R);
}

at::Tensor Sequences::mean(const at::Tensor& x_R) const {
  return sum(x_R).div(at::bincount(index_R_, {}, num_sequences_).to(x_R.scalar_type()));
}

at::Tensor Sequences::largest(const at::Tensor& x_R) const {
  const double lowest = -std::numeric_limits<double>::infinity();
  return at::full({num_sequences_}, lowest, x_R.options()).scatter_reduce(0, index_R_, x_R, "amax");
}

at::Tensor Sequences::to_rows(const at::Tensor& x_S) const {
  return x_S.index_select(0, index_R_);
}

}  // namespace bough
