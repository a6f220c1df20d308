// DPPO (divergence PPO; verl's dppo_tv and dppo_kl): r = pi / mu. The loss is -M sg(min(r, 20)) A log pi. r
// is not clipped. Instead M = 0 if the distance between pi and mu is above dppo_threshold (default 0.2) and
// pi moved in the direction of A (A > 0: pi above mu; else pi below mu). Otherwise M = 1.
// The distance is:
//   dppo_tv  |pi - mu|, the total variation between "this token" and "another token"
//   dppo_kl  mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))
// The loss itself corrects for mu, so no correction is added.
#include "algo/losses/policy_terms.h"

namespace bough {

namespace {

constexpr double kMaxRatio = 20.0;
constexpr double kTiny = 1e-30;  // keeps log(1 - p) finite at p = 1

// The policy term of each loss row, from its distance and `up` = pi - mu.
PolicyTerm masked(const PolicyRows& rows, const at::Tensor& distance_R, const at::Tensor& up_R) {
  const at::Tensor wants_up_R = rows.advantages_R.gt(0.0);
  const at::Tensor further_R =
      wants_up_R.logical_and(up_R.gt(0.0)).logical_or(wants_up_R.logical_not().logical_and(up_R.lt(0.0)));
  const at::Tensor masked_R = further_R.logical_and(distance_R.gt(rows.settings.dppo_threshold));
  const at::Tensor ratio_R = rows.log_ratio_R.detach().exp().clamp_max(kMaxRatio);
  const at::Tensor weight_R = ratio_R.mul(rows.advantages_R).masked_fill(masked_R, 0.0);
  return {weight_R.mul(rows.log_probs_R).neg(), masked_R};
}

PolicyTerm total_variation(const PolicyRows& rows) {
  const at::Tensor up_R = rows.log_probs_R.detach().exp().sub(rows.behaviour_log_probs_R.exp());
  return masked(rows, up_R.abs(), up_R);
}

PolicyTerm binary_kl(const PolicyRows& rows) {
  const at::Tensor log_pi_R = rows.log_probs_R.detach();
  const at::Tensor pi_R = log_pi_R.exp(), mu_R = rows.behaviour_log_probs_R.exp();
  const auto log_rest = [](const at::Tensor& p_R) { return p_R.neg().add(1.0).clamp_min(kTiny).log(); };
  const at::Tensor taken_R =
      mu_R.mul(rows.behaviour_log_probs_R.clamp_min(kLogProbFloor).sub(log_pi_R.clamp_min(kLogProbFloor)));
  const at::Tensor rest_R = mu_R.neg().add(1.0).mul(log_rest(mu_R).sub(log_rest(pi_R)));
  return masked(rows, taken_R.add(rest_R), pi_R.sub(mu_R));
}

}  // namespace

PolicyTermKind dppo_tv_term() {
  return {.against = Against::kBehaviour, .term = total_variation};
}

PolicyTermKind dppo_kl_term() {
  return {.against = Against::kBehaviour, .term = binary_kl};
}

}  // namespace bough
