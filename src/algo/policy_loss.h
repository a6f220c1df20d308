// A policy loss: a term of its own (losses/) and what all of them share: the choice of pi_old, corrections
// for off-policy tokens (corrections/), KL, entropy and metrics.
//
//   per_token = factor * term + kl_loss_coef * kl + distill_loss_weight * distillation - entropy_coef * H
//
// The factor multiplies the term only; tokens it sets to 0 stay in the denominator.
//
// With a teacher q the term's advantage is rl_loss_weight * A, and distillation, a reverse KL to q, is
//   k1      distill_loss_weight * sg(log q - log pi), added to that advantage (Thinking Machines 2025, Lu
//           et al., "On-policy distillation"; AReaL's with rl_loss_weight 0)
//   k2, k3  the estimator of the token drawn, with its gradient
//   topk    sum of pi log(pi / q) over the policy's most likely tokens, all others one more token: KL of two
//           coarser distributions, so at most the whole KL and never negative
// k2 has the gradient of the KL on samples of pi; k3's is another one's; that of k1 itself has mean 0, so
// that it is in the advantage.
//
// pi_old: the trainer's policy at the start of the update where use_decoupled_loss or recompute_logprob say
// so, else mu. Of the decoupled loss, by prox_logp_method:
//   recompute         the trainer's policy at the start of the update
//   metrics           the same, and metrics of how far loglinear is from it
//   reuse_train_logp  sg(pi): for batches that are one update, where it is the same
//   loglinear         interpolated_log_probs, without a walk
#pragma once

#include <vector>

#include "algo/corrections/corrections.h"
#include "algo/loss.h"
#include "algo/losses/policy_terms.h"
#include "algo/metric_reader.h"

namespace bough {

// log pi_old = log mu + a sg(log pi - log mu), a = clip((v_now - 1 - v_mu) / (v_now - v_mu), 0, 1), 0 where
// v_mu >= v_now: on the line from the policy that drew the token (version v_mu) to the trainer's (v_now), one
// update before its end. `versions_R`: v_mu.
at::Tensor interpolated_log_probs(const at::Tensor& behaviour_log_probs_R, const at::Tensor& log_probs_R,
                                  const at::Tensor& versions_R, int64_t version);

class PolicyLoss final : public Loss {
 public:
  // UserError: settings that contradict each other, or that this loss does not have.
  PolicyLoss(const LossSettings& settings, const PolicyTermKind& kind);

  Couples couples() const override { return couples_; }
  std::string aggregation() const override { return kind_.aggregation; }
  bool needs_advantages() const override { return true; }
  bool needs_behaviour() const override;
  bool needs_proximal() const override { return !interpolates() && recomputes_old(); }
  bool needs_reference() const override { return settings_.kl_loss_coef != 0.0; }
  bool needs_entropy() const override { return settings_.entropy_coef != 0.0 || settings_.target_entropy; }
  bool needs_teacher() const override { return settings_.teacher.is_used(); }
  GivenTokens given_tokens() const override;
  bool needs_versions() const override { return interpolates() || reports_interpolation(); }

  LossOutput operator()(const LossRows& rows) const override;

 private:
  bool decoupled() const { return takes_old_ && settings_.use_decoupled_loss; }
  bool recomputes_old() const { return takes_old_ && (decoupled() || settings_.recompute_logprob); }
  bool interpolates() const { return decoupled() && settings_.prox_logp_method == "loglinear"; }
  bool reports_interpolation() const { return decoupled() && settings_.prox_logp_method == "metrics"; }
  bool old_is_behaviour(const LossRows& rows) const;

  // log pi_old: interpolated; the current policy, detached; the proximal one; the behaviour policy.
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
  const bool takes_old_;  // something is made of pi_old
  Couples couples_;
};

}  // namespace bough
