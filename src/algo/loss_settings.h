// Settings of the losses. Names as AReaL has them, where it has them; verl's for the KL term.
#pragma once

#include <optional>
#include <string>

#include "base/settings.h"

namespace bough {

struct LossSettings {
  std::string loss = "ppo";
  double eps_clip = 0.2;
  std::optional<double> eps_clip_higher;  // unset: eps_clip on both sides
  std::optional<double> c_clip;           // unset: no dual clip
  bool use_decoupled_loss = true;         // implies recompute_logprob
  bool recompute_logprob = true;
  std::string prox_logp_method = "recompute";
  std::optional<double> behave_imp_weight_cap = 5.0;  // unset: no cap
  double entropy_coef = 0.0;
  double kl_loss_coef = 0.0;  // 0: no reference model is needed
  std::string kl_loss_type = "k3";

  template <class V>
  void visit(V& v) {
    v("loss", loss, "PPO clip, policy gradient, or supervised fine-tuning",
      aliased({"ppo", "pg", "sft"}, {{"grpo", "ppo"}}));
    v("eps_clip", eps_clip, "PPO: the ratio counts down to 1 - eps_clip", range(0.0, 1.0));
    v("eps_clip_higher", eps_clip_higher, "PPO: the ratio counts up to 1 + this (unset: eps_clip)",
      at_least(0.0));
    v("c_clip", c_clip, "PPO dual clip: for negative advantages the loss is at most -c_clip * A (unset: off)",
      above(1.0));
    v("use_decoupled_loss", use_decoupled_loss,
      "clip against the policy at the start of the update, and weight by it over the behaviour policy");
    v("recompute_logprob", recompute_logprob,
      "take pi_old from the trainer at the start of the update, not from the engine");
    v("prox_logp_method", prox_logp_method,
      "pi_old of the decoupled loss: recompute; loglinear (between the engine's and the trainer's, by each "
      "token's version, without a walk); metrics (recompute, and report how far loglinear is off); "
      "reuse_train_logp (the training pass's own, one mini-batch only)",
      one_of({"recompute", "loglinear", "metrics", "reuse_train_logp"}));
    v("behave_imp_weight_cap", behave_imp_weight_cap,
      "decoupled loss: tokens whose importance weight exceeds this count as 0", above(0.0));
    v("entropy_coef", entropy_coef, "entropy bonus: the loss gets -entropy_coef * H", at_least(0.0));
    v("kl_loss_coef", kl_loss_coef, "weight of the KL to the reference model in the loss", at_least(0.0));
    v("kl_loss_type", kl_loss_type, "estimator of that KL", one_of({"k2", "k3"}));
  }
};

}  // namespace bough
