// What all policy losses share: the choice of pi_old, the factor for off-policy tokens, KL, entropy, metrics.
// A new loss overrides policy_term and is added to make_loss's table.
//
//   per_token = factor * policy_term + kl_loss_coef * kl - entropy_coef * H
//   factor    = sg(w_t) where w_t <= cap, else 0     decoupled PPO (AReaL eq. 5), w_t = pi_old / mu
//             = 1                                     otherwise
//
// The factor multiplies the policy term only; tokens it sets to 0 stay in the denominator.
//
// pi_old of the decoupled loss, by prox_logp_method:
//   recompute         the trainer's policy at the start of the update
//   metrics           the same, and metrics of how far loglinear is from it
//   reuse_train_logp  sg(pi): for batches that are one update, where it is the same
//   loglinear         interpolated_log_probs, without a walk
#pragma once

#include "algo/loss.h"

namespace bough {

// log pi_old = log mu + a sg(log pi - log mu), a = clip((v_now - 1 - v_mu) / (v_now - v_mu), 0, 1), 0 where
// v_mu >= v_now: on the line from the policy that drew the token (version v_mu) to the trainer's (v_now), one
// update before its end. `versions_R`: v_mu.
at::Tensor interpolated_log_probs(const at::Tensor& behaviour_log_probs_R, const at::Tensor& log_probs_R,
                                  const at::Tensor& versions_R, int64_t version);

class PolicyLoss : public Loss {
 public:
  explicit PolicyLoss(const LossSettings& settings) : settings_(settings) {}

  bool token_separable() const override { return true; }
  bool needs_advantages() const override { return true; }
  bool needs_behaviour() const override { return false; }
  bool needs_proximal() const override { return false; }
  bool needs_reference() const override { return settings_.kl_loss_coef != 0.0; }
  bool needs_entropy() const override { return settings_.entropy_coef != 0.0; }

  LossOutput operator()(const LossRows& rows) const final;

 protected:
  struct Term {
    at::Tensor per_token_R;  // differentiable in log_probs_R
    at::Tensor clipped_R;    // bool: rows whose ratio a clip cut off; undefined where the loss has no clip
  };
  virtual Term policy_term(const LossRows& rows) const = 0;
  virtual bool decoupled() const { return false; }

  // log pi_old: interpolated; the current policy, detached; the proximal one; the behaviour policy.
  at::Tensor old_log_probs(const LossRows& rows) const;
  bool interpolates() const { return decoupled() && settings_.prox_logp_method == "loglinear"; }
  bool reports_interpolation() const { return decoupled() && settings_.prox_logp_method == "metrics"; }

  const LossSettings settings_;

 private:
  at::Tensor kl(const LossRows& rows) const;
  at::Tensor off_policy_factor(const LossRows& rows) const;
  at::Tensor trainer_log_probs(const LossRows& rows) const;
};

// pg: -A log pi(y_t).
class PolicyGradientLoss : public PolicyLoss {
 public:
  using PolicyLoss::PolicyLoss;

 protected:
  Term policy_term(const LossRows& rows) const override;
};

// ppo: -min(r_t A, clip(r_t, 1 - eps_clip, 1 + eps_clip_higher) A), r_t = pi / pi_old; with c_clip, for A < 0
// at most -c_clip A. Decoupled where the settings say so; without recompute_logprob pi_old is mu.
class PpoLoss : public PolicyLoss {
 public:
  using PolicyLoss::PolicyLoss;
  bool needs_behaviour() const override { return decoupled() || !settings_.recompute_logprob; }
  bool needs_proximal() const override {
    return !interpolates() && (decoupled() || settings_.recompute_logprob);
  }
  bool needs_versions() const override { return interpolates() || reports_interpolation(); }

 protected:
  Term policy_term(const LossRows& rows) const override;
  bool decoupled() const override { return settings_.use_decoupled_loss; }
};

}  // namespace bough
