// Clip-Cov and KL-Cov (Cui et al. 2025, "The entropy mechanism"). A few tokens of the mini-batch have a large
// covariance c = (A - mean A)(log pi - mean log pi). These tokens make the entropy collapse.
//   clip_cov  PPO clip, but the term of a fraction clip_cov_ratio (default 2e-4) of all tokens is 0. These
//             tokens are sampled from the unclipped tokens with clip_cov_lb (default 1) < c < clip_cov_ub
//             (default 5).
//   kl_cov    -r A. The fraction kl_cov_ratio (default 2e-4) of the tokens, those with the largest c, also
//             gets ppo_kl_coef (default 1) |log r|.
// At least one token is chosen if any token qualifies, as in verl. The random numbers depend only on the
// trainer's version and the index of the loss row in the mini-batch.
#include <ATen/ops/nonzero.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "algo/losses/policy_terms.h"
#include "base/random.h"

namespace bough {

namespace {

constexpr uint64_t kDrawSeed = 0x636f76;  // an arbitrary constant

at::Tensor covariance(const PolicyRows& rows) {
  const at::Tensor log_pi_R = rows.log_probs_R.detach();
  return rows.advantages_R.sub(rows.advantages_R.mean()).mul(log_pi_R.sub(log_pi_R.mean()));
}

int64_t count_of(double ratio, int64_t num_rows) {
  return std::clamp<int64_t>(static_cast<int64_t>(ratio * static_cast<double>(num_rows)), 1, num_rows);
}

// [R] bool: at random, `count` of the loss rows whose candidates_R is true, or all if there are fewer.
at::Tensor drawn_from(const at::Tensor& candidates_R, int64_t count, int64_t version) {
  const CounterRandom random(kDrawSeed, Purpose::shuffle);
  const at::Tensor rows = at::nonzero(candidates_R).squeeze(1).cpu().contiguous();
  std::vector<std::pair<uint64_t, int64_t>> order;
  for (int64_t i = 0; i < rows.numel(); ++i) {
    const int64_t row = rows.const_data_ptr<int64_t>()[i];
    order.emplace_back(random.bits(static_cast<uint64_t>(version), static_cast<uint64_t>(row)), row);
  }
  std::sort(order.begin(), order.end());
  order.resize(std::min(order.size(), static_cast<size_t>(count)));
  at::Tensor drawn_R = at::zeros_like(candidates_R);
  for (const auto& [bits, row] : order) drawn_R[row] = true;
  return drawn_R;
}

PolicyTerm clip_cov(const PolicyRows& rows) {
  const PolicyTerm ppo = clipped_surrogate(rows.log_ratio_R.exp(), rows);
  const int64_t num_rows = rows.log_probs_R.numel();
  if (num_rows == 0) return ppo;
  const at::Tensor c_R = covariance(rows);
  const at::Tensor candidates_R = c_R.gt(rows.settings.clip_cov_lb)
                                      .logical_and(c_R.lt(rows.settings.clip_cov_ub))
                                      .logical_and(ppo.clipped_R.logical_not());
  const at::Tensor drawn_R =
      drawn_from(candidates_R, count_of(rows.settings.clip_cov_ratio, num_rows), rows.version);
  return {ppo.per_token_R.masked_fill(drawn_R, 0.0), ppo.clipped_R.logical_or(drawn_R)};
}

PolicyTerm kl_cov(const PolicyRows& rows) {
  const at::Tensor free_R = rows.log_ratio_R.exp().mul(rows.advantages_R).neg();
  const int64_t num_rows = rows.log_probs_R.numel();
  if (num_rows == 0) return {free_R, {}};
  const int64_t count = count_of(rows.settings.kl_cov_ratio, num_rows);
  const at::Tensor top = std::get<1>(at::topk(covariance(rows), count));
  const at::Tensor chosen_R = at::zeros_like(free_R.detach()).index_fill(0, top, rows.settings.ppo_kl_coef);
  return {free_R.add(chosen_R.mul(rows.log_ratio_R.abs())), {}};
}

}  // namespace

PolicyTermKind clip_cov_term() {
  return {.coupling = CouplingScope::kBatch, .term = clip_cov};
}

PolicyTermKind kl_cov_term() {
  return {.coupling = CouplingScope::kBatch, .term = kl_cov};
}

}  // namespace bough
