// What all policy losses share: the choice of pi_old, the factor for off-policy tokens, KL, entropy, metrics.
// A new loss overrides policy_term and is added to make_loss's table.
//
//   per_token = factor * policy_term + kl_loss_coef * kl - entropy_coef * H
//   factor    = sg(w_t) where w_t <= cap, else 0     decoupled PPO (AReaL eq. 5), w_t = pi_old / mu
//             = 1                                     otherwise
//
// The factor multiplies the policy term only; tokens it sets to 0 stay in the denominator.
#pragma once

#include "algo/loss.h"

namespace bough {

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

  // log pi_old: the current policy detached, else the proximal policy, else the behaviour policy.
  static at::Tensor old_log_probs(const LossRows& rows);

  const LossSettings settings_;

 private:
  at::Tensor kl(const LossRows& rows) const;
  at::Tensor off_policy_factor(const LossRows& rows) const;
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
  bool needs_proximal() const override { return decoupled() || settings_.recompute_logprob; }

 protected:
  Term policy_term(const LossRows& rows) const override;
  bool decoupled() const override { return settings_.use_decoupled_loss; }
};

}  // namespace bough
