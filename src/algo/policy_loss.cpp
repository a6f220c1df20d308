#include "algo/policy_loss.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "algo/metric_reader.h"

namespace bough {

namespace {

// log(a / b), clamped. Clamping passes no gradient outside, so exp of it never multiplies inf by 0. Two
// probabilities that both underflowed to 0 count as equal: the floor keeps -inf - -inf from being NaN.
constexpr double kLogProbFloor = -1e30;
at::Tensor log_ratio(const at::Tensor& log_a_R, const at::Tensor& log_b_R) {
  return log_a_R.clamp_min(kLogProbFloor)
      .sub(log_b_R.clamp_min(kLogProbFloor))
      .clamp(-kMaxLogRatio, kMaxLogRatio);
}

void add_mismatch(MetricReader& metrics, const LossRows& rows, const at::Tensor& trainer_log_probs_R) {
  if (!rows.behaviour_log_probs_R.defined()) return;
  const at::Tensor log_w_R = log_ratio(trainer_log_probs_R, rows.behaviour_log_probs_R);
  const at::Tensor w_R = log_w_R.exp();
  metrics.add_mean("mismatch/logprob_abs_diff", log_w_R.abs());
  metrics.add_mean("mismatch/importance_weight_mean", w_R);
  metrics.add_max("mismatch/importance_weight_max", w_R);
}

// How far the interpolated pi_old is from the one that was computed.
void add_interpolation_error(MetricReader& metrics, const LossRows& rows, const at::Tensor& log_old_R) {
  const at::Tensor interpolated_R = interpolated_log_probs(
      rows.behaviour_log_probs_R, rows.log_probs_R.detach(), rows.versions_R, rows.version);
  const at::Tensor error_R = log_ratio(log_old_R, interpolated_R);
  const at::Tensor w_R = log_ratio(log_old_R, rows.behaviour_log_probs_R).exp();
  const at::Tensor approximate_w_R = log_ratio(interpolated_R, rows.behaviour_log_probs_R).exp();
  metrics.add_mean("prox_approx/abs_error", error_R.abs());
  metrics.add_max("prox_approx/abs_error_max", error_R.abs());
  metrics.add_mean("prox_approx/squared_error", error_R.square());
  metrics.add_mean("prox_approx/importance_weight_abs_error", approximate_w_R.sub(w_R).abs());
}

}  // namespace

at::Tensor interpolated_log_probs(const at::Tensor& behaviour_log_probs_R, const at::Tensor& log_probs_R,
                                  const at::Tensor& versions_R, int64_t version) {
  const at::Tensor log_mu_R = behaviour_log_probs_R.clamp_min(kLogProbFloor);
  const at::Tensor age_R = versions_R.to(log_mu_R.scalar_type()).neg().add(version);
  // An age of 0 or less gives 0: the clamp keeps the division from one by 0.
  const at::Tensor a_R = age_R.sub(1.0).div(age_R.clamp_min(1.0)).clamp(0.0, 1.0);
  return log_mu_R.add(a_R.mul(log_probs_R.detach().clamp_min(kLogProbFloor).sub(log_mu_R)));
}

at::Tensor PolicyLoss::old_log_probs(const LossRows& rows) const {
  if (interpolates())
    return interpolated_log_probs(rows.behaviour_log_probs_R, rows.log_probs_R, rows.versions_R,
                                  rows.version);
  if (rows.proximal_is_current) return rows.log_probs_R.detach();
  return rows.proximal_log_probs_R.defined() ? rows.proximal_log_probs_R : rows.behaviour_log_probs_R;
}

// The trainer's policy that is set against mu: pi_old, or where that is mu itself, the current one.
at::Tensor PolicyLoss::trainer_log_probs(const LossRows& rows) const {
  const bool old_is_behaviour =
      !interpolates() && !rows.proximal_is_current && !rows.proximal_log_probs_R.defined();
  return old_is_behaviour ? rows.log_probs_R.detach() : old_log_probs(rows);
}

// d = log pi_ref - log pi: k2 = d^2/2, k3 = exp(d) - d - 1.
at::Tensor PolicyLoss::kl(const LossRows& rows) const {
  const at::Tensor d_R = log_ratio(rows.reference_log_probs_R, rows.log_probs_R);
  // expm1(d) - d keeps the digits that exp(d) - d - 1 loses near d = 0, where a policy spends its time.
  return settings_.kl_loss_type == "k2" ? d_R.square().mul(0.5) : d_R.expm1().sub(d_R);
}

at::Tensor PolicyLoss::off_policy_factor(const LossRows& rows) const {
  const at::Tensor w_R = log_ratio(old_log_probs(rows), rows.behaviour_log_probs_R).exp();
  if (!settings_.behave_imp_weight_cap) return w_R;
  return at::where(w_R.le(*settings_.behave_imp_weight_cap), w_R, at::zeros_like(w_R));
}

LossOutput PolicyLoss::operator()(const LossRows& rows) const {
  check_rows(*this, rows);
  MetricReader metrics(rows.log_probs_R.numel());
  Term term = policy_term(rows);
  if (decoupled()) {
    const at::Tensor factor_R = off_policy_factor(rows);
    term.per_token_R = factor_R.mul(term.per_token_R);
    metrics.add_mean("mismatch/masked_fraction", factor_R.eq(0.0));
  }
  metrics.add_sum("loss/policy", rows.weights_R.mul(term.per_token_R.detach()));
  at::Tensor per_token_R = term.per_token_R;
  if (rows.reference_log_probs_R.defined()) {
    const at::Tensor kl_R = kl(rows);
    if (needs_reference()) per_token_R = per_token_R.add(kl_R, settings_.kl_loss_coef);
    metrics.add_sum("loss/kl", rows.weights_R.mul(kl_R.detach()));
  }
  if (rows.entropies_R.defined()) {
    if (needs_entropy()) per_token_R = per_token_R.sub(rows.entropies_R, settings_.entropy_coef);
    metrics.add_sum("loss/entropy", rows.weights_R.mul(rows.entropies_R.detach()));
  }
  if (term.clipped_R.defined()) metrics.add_mean("policy/clip_fraction", term.clipped_R);
  if (old_log_probs(rows).defined()) {
    // KL(pi_old, pi) by k3 on samples of pi_old: r - 1 - log r, never negative.
    const at::Tensor log_r_R = log_ratio(rows.log_probs_R.detach(), old_log_probs(rows));
    metrics.add_mean("policy/approx_kl", log_r_R.expm1().sub(log_r_R));
  }
  add_mismatch(metrics, rows, trainer_log_probs(rows));
  if (reports_interpolation()) add_interpolation_error(metrics, rows, old_log_probs(rows));
  return {rows.weights_R.mul(per_token_R).sum(), metrics.read()};
}

PolicyLoss::Term PolicyGradientLoss::policy_term(const LossRows& rows) const {
  return {rows.advantages_R.mul(rows.log_probs_R).neg(), {}};
}

PolicyLoss::Term PpoLoss::policy_term(const LossRows& rows) const {
  const at::Tensor ratio_R = log_ratio(rows.log_probs_R, old_log_probs(rows)).exp();
  const double high = settings_.eps_clip_higher.value_or(settings_.eps_clip);
  const at::Tensor minus_a_R = rows.advantages_R.neg();
  const at::Tensor free_R = minus_a_R.mul(ratio_R);
  const at::Tensor bounded_R = minus_a_R.mul(ratio_R.clamp(1.0 - settings_.eps_clip, 1.0 + high));
  // Inside the clip both are equal and autograd gives each half of the (same) gradient.
  at::Tensor per_token_R = at::maximum(free_R, bounded_R);
  at::Tensor clipped_R = bounded_R.detach().gt(free_R.detach());
  if (settings_.c_clip) {
    const at::Tensor ceiling_R = minus_a_R.mul(*settings_.c_clip);
    const at::Tensor cut_R = rows.advantages_R.lt(0.0).logical_and(per_token_R.detach().gt(ceiling_R));
    per_token_R = at::where(cut_R, ceiling_R, per_token_R);
    clipped_R = clipped_R.logical_or(cut_R);
  }
  return {per_token_R, clipped_R};
}

}  // namespace bough
