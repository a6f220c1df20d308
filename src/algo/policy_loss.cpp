#include "algo/policy_loss.h"

#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "algo/metrics_by_age.h"
#include "base/error.h"

namespace bough {

namespace {

// Sums over a vocabulary round away probabilities below exp(-kLogRestFloor).
constexpr double kLogRestFloor = 30.0;

// Metrics of w = pi_old / mu at the sampled token, before any correction. If pi_old is mu: w = pi / mu.
void add_mismatch(MetricReader& metrics, const at::Tensor& log_w_R) {
  const at::Tensor w_R = log_w_R.exp();
  metrics.add_mean("mismatch/logprob_abs_diff", log_w_R.abs());
  metrics.add_mean("mismatch/importance_weight_mean", w_R);
  metrics.add_max("mismatch/importance_weight_max", w_R);
  // KL(mu, pi_old) on samples of mu.
  metrics.add_mean("mismatch/kl_k1", log_w_R.neg());
  metrics.add_mean("mismatch/kl_k3", log_w_R.expm1().sub(log_w_R));
}

// Metrics of the difference between the interpolated pi_old and the computed one.
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

// log(1 - sum of exp(log_p)) per loss row: the log-probability of all other tokens together. Bounded from
// below.
at::Tensor log_rest(const at::Tensor& log_p_RK) {
  const at::Tensor sum_R = log_p_RK.clamp_min(-kLogRestFloor).exp().sum(1);
  return sum_R.neg().add(1.0).clamp_min(std::exp(-kLogRestFloor)).log();
}

// KL(p, q) per loss row of two distributions over the K tokens and one more token that stands for all other
// tokens. Tokens whose logarithms are at most -kLogRestFloor count as absent. Differentiable in log_p.
at::Tensor kl_of_top_k(const at::Tensor& log_p_RK, const at::Tensor& log_q_RK) {
  const at::Tensor p_RK = log_p_RK.clamp_min(-kLogRestFloor), q_RK = log_q_RK.clamp_min(-kLogRestFloor);
  const at::Tensor rest_R = log_rest(p_RK), rest_of_q_R = log_rest(q_RK);
  return p_RK.exp().mul(p_RK.sub(q_RK)).sum(1).add(rest_R.exp().mul(rest_R.sub(rest_of_q_R)));
}

CouplingScope most_coupled(const PolicyTermKind& kind, const std::vector<CorrectionKind>& corrections) {
  CouplingScope coupling = kind.coupling;
  for (const CorrectionKind& correction : corrections) coupling = std::max(coupling, correction.coupling);
  return coupling;
}

}  // namespace

at::Tensor interpolated_log_probs(const at::Tensor& behaviour_log_probs_R, const at::Tensor& log_probs_R,
                                  const at::Tensor& versions_R, int64_t version) {
  const at::Tensor log_mu_R = behaviour_log_probs_R.clamp_min(kLogProbFloor);
  const at::Tensor age_R = versions_R.to(log_mu_R.scalar_type()).neg().add(version);
  // An age of 0 or less gives a = 0. The clamp of the divisor avoids a division by 0 at age 0.
  const at::Tensor a_R = age_R.sub(1.0).div(age_R.clamp_min(1.0)).clamp(0.0, 1.0);
  return log_mu_R.add(a_R.mul(log_probs_R.detach().clamp_min(kLogProbFloor).sub(log_mu_R)));
}

PolicyLoss::PolicyLoss(const LossSettings& settings, const PolicyTermKind& kind)
    : settings_(settings),
      kind_(kind),
      corrections_(find_corrections(settings, kind.against)),
      takes_old_(kind.against == Against::kOld || !corrections_.empty() ||
                 (settings.kl_loss_coef != 0.0 && settings.kl_loss_type == "unbiased")),
      coupling_(most_coupled(kind, corrections_)) {
  if (settings.c_clip && !kind.has_dual_clip)
    throw UserError(
        str("setting c_clip: loss ", settings.loss, " has no dual clip; leave it out, or set loss to ppo"));
  if (settings.prox_logp_method != "recompute" && !takes_old_)
    throw UserError(str("setting prox_logp_method: got ", settings.prox_logp_method, ", but loss ",
                        settings.loss, " does not use pi_old; leave it out"));
  const bool reads_top_k = std::ranges::any_of(corrections_, &CorrectionKind::reads_top_k);
  if (settings.teacher.by_top_tokens() && (reads_top_k || needs_reference_top_k()))
    throw UserError(
        str("setting teacher.loss_mode: got topk, which needs the policy's most likely tokens, with ",
            reads_top_k ? "correction " + settings.correction : "kl_loss_type topk",
            ", which needs the engine's; expected k1, k2 or k3, or another ",
            reads_top_k ? "correction" : "kl_loss_type"));
  if (reads_top_k && interpolates())
    throw UserError(str("setting prox_logp_method: correction ", settings.correction,
                        " needs pi_old of tokens that were not sampled; expected recompute"));
}

TopKTokens PolicyLoss::top_k_tokens() const {
  if (settings_.teacher.by_top_tokens()) return TopKTokens::kPolicyTop;
  const bool reads =
      needs_reference_top_k() || std::ranges::any_of(corrections_, &CorrectionKind::reads_top_k);
  return reads ? TopKTokens::kEngineTop : TopKTokens::kNone;
}

bool PolicyLoss::needs_rows() const {
  return std::ranges::any_of(corrections_, &CorrectionKind::draws_by_row);
}

bool PolicyLoss::needs_behaviour() const {
  return kind_.against == Against::kBehaviour || !corrections_.empty() || decoupled() ||
         (takes_old_ && !settings_.recompute_logprob);
}

bool PolicyLoss::old_is_behaviour(const LossRows& rows) const {
  return !interpolates() && !rows.proximal_is_current && !rows.proximal_log_probs_R.defined();
}

at::Tensor PolicyLoss::old_log_probs(const LossRows& rows) const {
  if (interpolates())
    return interpolated_log_probs(rows.behaviour_log_probs_R, rows.log_probs_R, rows.versions_R,
                                  rows.version);
  if (rows.proximal_is_current) return rows.log_probs_R.detach();
  return rows.proximal_log_probs_R.defined() ? rows.proximal_log_probs_R : rows.behaviour_log_probs_R;
}

PolicyTerm PolicyLoss::policy_term(const LossRows& rows, const Sequences* sequences) const {
  const double low = settings_.eps_clip.value_or(kind_.eps_low);
  const double high = settings_.eps_clip_higher.value_or(settings_.eps_clip.value_or(kind_.eps_high));
  at::Tensor log_ratio_R;
  if (kind_.against == Against::kOld) log_ratio_R = log_ratio(rows.log_probs_R, old_log_probs(rows));
  if (kind_.against == Against::kBehaviour)
    log_ratio_R = log_ratio(rows.log_probs_R, rows.behaviour_log_probs_R);
  return kind_.term({settings_, low, high, rows.log_probs_R, log_ratio_R, advantages(rows),
                     rows.behaviour_log_probs_R, sequences, rows.version});
}

at::Tensor PolicyLoss::correction_factor(const LossRows& rows, const at::Tensor& log_w_R,
                                         const Sequences* sequences, MetricReader& metrics) const {
  CorrectionRows correction_rows{settings_,
                                 log_w_R,
                                 rows.log_probs_R.detach(),
                                 rows.behaviour_log_probs_R,
                                 advantages(rows),
                                 sequences,
                                 {},
                                 {},
                                 rows.behaviour_top_k_RK,
                                 rows.version,
                                 rows.rows_R};
  if (top_k_tokens() == TopKTokens::kEngineTop)
    correction_rows.old_top_k_RK =
        rows.proximal_is_current ? rows.top_k_log_probs_RK.detach() : rows.proximal_top_k_RK;
  at::Tensor factor_R = at::ones_like(log_w_R);
  at::Tensor truncated_R;
  for (const CorrectionKind& correction : corrections_) {
    correction_rows.bounds = correction.bounds;
    const Corrected corrected = correction.apply(correction_rows);
    factor_R = factor_R.mul(corrected.factor_R);
    if (corrected.truncated_R.defined()) truncated_R = corrected.truncated_R;
    for (const auto& [name, values_R] : corrected.means) metrics.add_mean(name, values_R);
  }
  metrics.add_mean("mismatch/factor_mean", factor_R);
  metrics.add_mean("mismatch/factor_square_mean", factor_R.square());
  metrics.add_max("mismatch/factor_max", factor_R);
  metrics.add_mean("mismatch/masked_fraction", factor_R.eq(0.0));
  if (truncated_R.defined()) metrics.add_mean("mismatch/truncated_fraction", truncated_R);
  if (sequences) metrics.add_mean("mismatch/sequences_dropped", sequences->largest(factor_R).eq(0.0));
  return factor_R;
}

at::Tensor PolicyLoss::kl(const LossRows& rows) const {
  const std::string& type = settings_.kl_loss_type;
  if (type == "topk") {
    // A row with fewer than K tokens lists one token again, with mu of 0.
    const at::Tensor absent_RK = rows.behaviour_top_k_RK.isneginf();
    return kl_of_top_k(rows.top_k_log_probs_RK.masked_fill(absent_RK, -kLogRestFloor),
                       rows.reference_top_k_RK.masked_fill(absent_RK, -kLogRestFloor));
  }
  const at::Tensor kl_R =
      kl_estimate(type == "unbiased" ? "k3" : type, rows.log_probs_R, rows.reference_log_probs_R);
  if (type != "unbiased") return kl_R;
  return log_ratio(rows.log_probs_R, old_log_probs(rows)).exp().mul(kl_R);
}

// The advantages of the policy term: those from rewards plus the teacher's part.
at::Tensor PolicyLoss::advantages(const LossRows& rows) const {
  const TeacherSettings& teacher = settings_.teacher;
  if (!teacher.is_used()) return rows.advantages_R;
  const at::Tensor weighted_R = rows.advantages_R.mul(teacher.rl_loss_weight);
  if (teacher.loss_mode != "k1") return weighted_R;
  return weighted_R.add(log_ratio(rows.teacher_log_probs_R, rows.log_probs_R.detach()),
                        teacher.distill_loss_weight);
}

// The teacher's loss term per loss row. Undefined if the teacher's part is in the advantages.
at::Tensor PolicyLoss::distillation(const LossRows& rows, MetricReader& metrics) const {
  const std::string& mode = settings_.teacher.loss_mode;
  const at::Tensor current_R = rows.log_probs_R.detach();
  metrics.add_mean("teacher/kl_k1", kl_estimate("k1", current_R, rows.teacher_log_probs_R));
  metrics.add_mean("teacher/kl_k3", kl_estimate("k3", current_R, rows.teacher_log_probs_R));
  if (mode == "k1") return {};
  if (mode != "topk") return kl_estimate(mode, rows.log_probs_R, rows.teacher_log_probs_R);
  const at::Tensor kl_R = kl_of_top_k(rows.top_k_log_probs_RK, rows.teacher_top_k_RK);
  metrics.add_mean("teacher/kl_topk", kl_R.detach());
  metrics.add_mean("teacher/topk_mass", rows.top_k_log_probs_RK.detach().exp().sum(1));
  metrics.add_mean("teacher/topk_teacher_mass", rows.teacher_top_k_RK.exp().sum(1));
  return kl_R;
}

LossOutput PolicyLoss::operator()(const LossRows& rows) const {
  check_rows(*this, rows);
  MetricReader metrics;
  std::optional<Sequences> sequences;
  if (coupling_ != CouplingScope::kNothing) sequences.emplace(rows.sequences_R);
  const Sequences* whole = sequences ? &*sequences : nullptr;
  PolicyTerm term = policy_term(rows, whole);
  if (rows.behaviour_log_probs_R.defined()) {
    // mu is compared with pi_old. If pi_old is mu itself, mu is compared with the current policy.
    const at::Tensor trainer_R = old_is_behaviour(rows) ? rows.log_probs_R.detach() : old_log_probs(rows);
    const at::Tensor log_w_R = log_ratio(trainer_R, rows.behaviour_log_probs_R);
    add_mismatch(metrics, log_w_R);
    if (!corrections_.empty())
      term.per_token_R = correction_factor(rows, log_w_R, whole, metrics).mul(term.per_token_R);
  }
  if (reports_interpolation()) add_interpolation_error(metrics, rows, old_log_probs(rows));
  metrics.add_sum("loss/policy", rows.weights_R.mul(term.per_token_R.detach()));
  at::Tensor per_token_R = term.per_token_R;
  if (needs_reference() || (rows.reference_log_probs_R.defined() && settings_.kl_loss_type != "topk")) {
    const at::Tensor kl_R = kl(rows);
    if (needs_reference()) per_token_R = per_token_R.add(kl_R, settings_.kl_loss_coef);
    metrics.add_sum("loss/kl", rows.weights_R.mul(kl_R.detach()));
  }
  if (needs_teacher()) {
    const at::Tensor distillation_R = distillation(rows, metrics);
    if (distillation_R.defined()) {
      per_token_R = per_token_R.add(distillation_R, settings_.teacher.distill_loss_weight);
      metrics.add_sum("loss/distill", rows.weights_R.mul(distillation_R.detach()));
    }
  }
  if (rows.entropies_R.defined()) {
    if (needs_entropy())
      per_token_R = per_token_R.sub(rows.entropies_R, rows.entropy_coef.value_or(settings_.entropy_coef));
    if (settings_.target_entropy) metrics.add_mean("policy/entropy", rows.entropies_R.detach());
    metrics.add_sum("loss/entropy", rows.weights_R.mul(rows.entropies_R.detach()));
  }
  if (term.clipped_R.defined()) metrics.add_mean("policy/clip_fraction", term.clipped_R);
  if (old_log_probs(rows).defined()) {
    // KL(pi_old, pi) by k3 on samples of pi_old: r - 1 - log r, which is never negative.
    const at::Tensor log_r_R = log_ratio(rows.log_probs_R.detach(), old_log_probs(rows));
    metrics.add_mean("policy/approx_kl", log_r_R.expm1().sub(log_r_R));
  }
  if (rows.behaviour_log_probs_R.defined() && rows.versions_R.defined())
    add_metrics_by_age(metrics, log_ratio(rows.log_probs_R.detach(), rows.behaviour_log_probs_R),
                       term.clipped_R, rows.versions_R, rows.version);
  LossOutput output{.loss = rows.weights_R.mul(per_token_R).sum()};
  output.add_metrics(std::move(metrics));
  return output;
}

}  // namespace bough
