#include "algo/policy_rows.h"

#include <ATen/ops/bincount.h>
#include <ATen/ops/full.h>
#include <ATen/ops/unique_consecutive.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "algo/controllers.h"

namespace bough {

at::Tensor log_ratio(const at::Tensor& log_a_R, const at::Tensor& log_b_R) {
  return log_a_R.clamp_min(kLogProbFloor)
      .sub(log_b_R.clamp_min(kLogProbFloor))
      .clamp(-kMaxLogRatio, kMaxLogRatio);
}

at::Tensor kl_estimate(const std::string& estimator, const at::Tensor& log_p_R, const at::Tensor& log_q_R) {
  const at::Tensor d_R = log_ratio(log_q_R, log_p_R);
  if (estimator == "k1") return d_R.neg();
  if (estimator == "k2") return d_R.square().mul(0.5);
  // expm1(d) - d keeps the digits that exp(d) - d - 1 loses near d = 0, the usual case.
  return d_R.expm1().sub(d_R);
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

at::Tensor kl_to_go(const at::Tensor& kl_R, const at::Tensor& sequences_R) {
  const at::Tensor sums_R = kl_R.to(at::kCPU, at::kDouble).clone();
  const at::Tensor own_R = sequences_R.cpu().contiguous();
  auto* sums = sums_R.mutable_data_ptr<double>();
  const auto* sequence = own_R.const_data_ptr<int64_t>();
  for (int64_t row = sums_R.numel() - 2; row >= 0; --row)
    if (sequence[row] == sequence[row + 1]) sums[row] += sums[row + 1];
  return sums_R.to(kl_R.options());
}

double mean_of_sequence_means(const at::Tensor& x_R, const at::Tensor& sequences_R) {
  return x_R.numel() == 0 ? 0.0 : Sequences(sequences_R).mean(x_R).mean().item<double>();
}

}  // namespace bough
