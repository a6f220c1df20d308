// PPO clip (Schulman et al. 2017): -min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_higher) A), r = pi / pi_old.
// DAPO's clip-higher is eps_clip_higher 0.28.
// Dual clip (Ye et al. 2020; TRL's delta): if c_clip is set and A < 0, the term is at most -c_clip A.
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>

#include "algo/losses/policy_terms.h"

namespace bough {

PolicyTerm clipped_surrogate(const at::Tensor& ratio_R, const PolicyRows& rows) {
  const at::Tensor minus_a_R = rows.advantages_R.neg();
  const at::Tensor free_R = minus_a_R.mul(ratio_R);
  const at::Tensor bounded_R = minus_a_R.mul(ratio_R.clamp(1.0 - rows.eps_low, 1.0 + rows.eps_high));
  // Inside the clip free_R equals bounded_R. Autograd gives each of them half of the (same) gradient.
  return {at::maximum(free_R, bounded_R), bounded_R.detach().gt(free_R.detach())};
}

namespace {
PolicyTerm term(const PolicyRows& rows) {
  PolicyTerm out = clipped_surrogate(rows.log_ratio_R.exp(), rows);
  if (!rows.settings.c_clip) return out;
  const at::Tensor ceiling_R = rows.advantages_R.mul(-*rows.settings.c_clip);
  const at::Tensor cut_R = rows.advantages_R.lt(0.0).logical_and(out.per_token_R.detach().gt(ceiling_R));
  return {at::where(cut_R, ceiling_R, out.per_token_R), out.clipped_R.logical_or(cut_R)};
}
}  // namespace

PolicyTermKind ppo_term() {
  return {.has_dual_clip = true, .term = term};
}

}  // namespace bough
