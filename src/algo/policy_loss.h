// A policy loss: a term (losses/) and the parts that all policy losses have. These are the choice of pi_old,
// corrections for off-policy tokens (corrections/), KL, entropy and metrics.
//
//   per_token = factor * term + kl_loss_coef * kl + distill_loss_weight * distillation - entropy_coef * H
//
// The factor is the product of the corrections. It multiplies the term only. Tokens that it sets to 0 stay
// in the denominator.
//
// With a teacher q, the term's advantage is rl_loss_weight * A. Distillation is a reverse KL to q, by
// loss_mode (sg: stop-gradient):
//   k1      distill_loss_weight * sg(log q - log pi), added to the term's advantage (Thinking Machines 2025,
//           Lu et al., "On-policy distillation"; AReaL's distillation if rl_loss_weight is 0)
//   k2, k3  the estimator at the sampled token, with its gradient
//   topk    sum of pi log(pi / q) over the policy's top-k tokens and one more token that stands for all other
//           tokens: the KL of two coarser distributions, so at most the full KL and never negative
// kl_loss_type topk is this KL to the reference, over the tokens that the engine returned.
// On samples of pi, the gradient of k2 is the gradient of the KL, and the gradient of k3 is not. The
// gradient of k1 has mean 0, therefore k1 is part of the advantage.
//
// If use_decoupled_loss is false, pi_old is mu if recompute_logprob is false, otherwise the trainer's policy
// at the start of the update. If use_decoupled_loss is true, recompute_logprob is ignored, and pi_old is by
// prox_logp_method:
//   recompute         the trainer's policy at the start of the update
//   metrics           as recompute; the metrics also report the error of loglinear
//   reuse_train_logp  sg(pi), which equals recompute if the batch is one optimizer step
//   loglinear         interpolated_log_probs(), which needs no extra forward pass
#pragma once

#include <vector>

#include "algo/corrections/corrections.h"
#include "algo/loss.h"
#include "algo/losses/policy_terms.h"
#include "algo/metric_reader.h"

namespace bough {

// Estimates log pi_old, the policy of version v_now - 1, by interpolation between the behavior policy mu
// (version v_mu) and the trainer's current policy pi (version v_now):
//   log pi_old = log mu + a sg(log pi - log mu),  a = clip((v_now - 1 - v_mu) / (v_now - v_mu), 0, 1)
// and a = 0 if v_mu >= v_now. versions_R: int32, v_mu of each loss row. `version`: v_now. Returns [R], no
// gradient.
at::Tensor interpolated_log_probs(const at::Tensor& behaviour_log_probs_R, const at::Tensor& log_probs_R,
                                  const at::Tensor& versions_R, int64_t version);

class PolicyLoss final : public Loss {
 public:
  // Throws UserError if settings contradict each other, or if a setting is set that this loss does not have.
  PolicyLoss(const LossSettings& settings, const PolicyTermKind& kind);

  CouplingScope coupling() const override { return coupling_; }
  std::string aggregation() const override { return kind_.aggregation; }
  bool needs_advantages() const override { return true; }
  bool needs_behaviour() const override;
  bool needs_rows() const override;
  bool needs_proximal() const override { return !interpolates() && recomputes_old(); }
  bool needs_reference() const override { return settings_.kl_loss_coef != 0.0; }
  bool needs_reference_top_k() const override {
    return needs_reference() && settings_.kl_loss_type == "topk";
  }
  bool needs_entropy() const override { return settings_.entropy_coef != 0.0 || settings_.target_entropy; }
  bool needs_teacher() const override { return settings_.teacher.is_used(); }
  TopKTokens top_k_tokens() const override;
  bool needs_versions() const override { return interpolates() || reports_interpolation(); }

  LossOutput operator()(const LossRows& rows) const override;

 private:
  bool decoupled() const { return takes_old_ && settings_.use_decoupled_loss; }
  bool recomputes_old() const { return takes_old_ && (decoupled() || settings_.recompute_logprob); }
  bool interpolates() const { return decoupled() && settings_.prox_logp_method == "loglinear"; }
  bool reports_interpolation() const { return decoupled() && settings_.prox_logp_method == "metrics"; }
  bool old_is_behaviour(const LossRows& rows) const;

  // Returns log pi_old [R], no gradient. Undefined if pi_old is mu and behaviour_log_probs_R is undefined.
  at::Tensor old_log_probs(const LossRows& rows) const;
  PolicyTerm policy_term(const LossRows& rows, const Sequences* sequences) const;
  at::Tensor correction_factor(const LossRows& rows, const at::Tensor& log_w_R, const Sequences* sequences,
                               MetricReader& metrics) const;
  at::Tensor kl(const LossRows& rows) const;
  at::Tensor advantages(const LossRows& rows) const;
  at::Tensor distillation(const LossRows& rows, MetricReader& metrics) const;

  const LossSettings settings_;
  const PolicyTermKind kind_;
  const std::vector<CorrectionKind> corrections_;
  const bool takes_old_;  // the term, a correction or the KL uses pi_old
  CouplingScope coupling_;
};

}  // namespace bough
