// Settings of the losses and their corrections. Names follow AReaL if it has the setting, otherwise verl (KL
// term, covariances) or TRL. docs/algorithms.md says which loss reads which setting.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/settings.h"

namespace bough {

// All losses and corrections, the valid values of the settings `loss` and `correction`.
std::vector<std::string> loss_names();
std::vector<std::string> correction_names();

// corrections/rejection_sampling.cpp has the equation.
struct RejectionSampling {
  std::string level = "token";
  std::string action = "mask";
  std::string metric = "ratio";
  std::string agg = "mean";
  double upper = 5.0;
  std::optional<double> lower;

  bool operator==(const RejectionSampling&) const = default;
  // False if all values are defaults, which have the same effect as correction `cap` with its default.
  bool says_anything() const { return *this != RejectionSampling(); }

  template <class V>
  void visit(V& v) {
    v("level", level, "compare each token with the bounds, or all trained tokens of a sequence together",
      one_of({"token", "sequence"}));
    v("action", action,
      "outside the bounds: mask (the weight is 0), or clamp (the weight is clamped to the bounds)",
      one_of({"mask", "clamp"}));
    v("metric", metric,
      "compared value: ratio (pi_old / mu), or an estimate of the KL between the two policies",
      one_of({"ratio", "kl_k1", "kl_k2", "kl_k3"}));
    v("agg", agg, "level sequence: aggregation of the metric over tokens (metric ratio: of its logarithm)",
      one_of({"sum", "mean", "max"}));
    v("upper", upper, "upper bound of the metric; above 1 with metric ratio");
    v("lower", lower, "lower bound of the metric (unset: none)");
  }
  // Throws UserError if settings contradict each other.
  void check() const {
    if (metric == "ratio" && upper <= 1.0)
      throw UserError(str("rejection_sampling.upper: got ", upper, ", expected above 1 with metric ratio"));
    if (metric == "ratio" && lower && *lower <= 0.0)
      throw UserError(str("rejection_sampling.lower: got ", *lower, ", expected above 0 with metric ratio"));
    if (lower && *lower > upper)
      throw UserError(str("rejection_sampling.lower: got ", *lower,
                          ", expected at most rejection_sampling.upper, ", upper));
    if (action == "clamp" && metric != "ratio")
      throw UserError(str("rejection_sampling.action: got clamp with metric ", metric,
                          ", but only a ratio can be clamped; expected mask"));
  }
};

// On-policy distillation (policy_loss.h): a frozen teacher model gives log-probabilities for the tokens that
// the policy sampled.
struct TeacherSettings {
  std::string path;
  double rl_loss_weight = 1.0;
  double distill_loss_weight = 1.0;
  std::string loss_mode = "k1";
  int64_t topk = 32;

  template <class V>
  void visit(V& v) {
    v("path", path, "teacher model of on-policy distillation, a Hugging Face directory (empty: none)");
    v("rl_loss_weight", rl_loss_weight, "weight of the advantages from rewards; 0: the teacher alone",
      at_least(0.0));
    v("distill_loss_weight", distill_loss_weight, "weight of the reverse KL to the teacher", at_least(0.0));
    v("loss_mode", loss_mode,
      "k1: log q - log pi of the sampled token is added to its advantage; k2, k3: KL estimator in the loss; "
      "topk: KL over the policy's topk most likely tokens and the rest, in the loss",
      one_of({"k1", "k2", "k3", "topk"}));
    v("topk", topk, "loss_mode topk: number of tokens", range(1, 100'000));
  }
  bool is_used() const { return !path.empty(); }
  bool by_top_tokens() const { return is_used() && loss_mode == "topk"; }
};

// Control of the coefficient of the KL in the reward (algo/controllers.h).
struct KlControlSettings {
  std::string type = "fixed";
  double target_kl = 0.1;
  double horizon = 10000;

  template <class V>
  void visit(V& v) {
    v("type", type, "fixed: the coefficient is constant; adaptive: it follows target_kl",
      one_of({"fixed", "adaptive"}));
    v("target_kl", target_kl, "adaptive: target of the KL", above(0.0));
    v("horizon", horizon,
      "adaptive: number of sequences over which the coefficient changes by at most a fifth", above(0.0));
  }
};

struct LossSettings {
  std::string loss = "ppo";
  std::optional<double> eps_clip;         // unset: the loss's default
  std::optional<double> eps_clip_higher;  // unset: eps_clip; if eps_clip is unset too, the loss's default
  std::optional<double> c_clip;           // unset: no dual clip
  double sapo_tau_pos = 1.0;
  double sapo_tau_neg = 1.05;
  double dppo_threshold = 0.2;
  double clip_cov_ratio = 2e-4;
  double clip_cov_lb = 1.0;
  double clip_cov_ub = 5.0;
  double kl_cov_ratio = 2e-4;
  double ppo_kl_coef = 1.0;
  bool use_decoupled_loss = true;  // if true, recompute_logprob is ignored
  bool recompute_logprob = true;
  std::string prox_logp_method = "recompute";
  std::string correction = "auto";
  std::string correction_level = "token";
  std::optional<double> correction_lower, correction_upper;  // unset: the correction's defaults
  double correction_veto = 1e-4;
  std::optional<double> behave_imp_weight_cap = 5.0;  // unset: no cap
  RejectionSampling rejection_sampling;
  std::optional<double> off_policy_mask_threshold, m2_threshold;  // unset: off
  double obrs_lambda = 1.0;
  std::string obrs_normalizer = "rest";
  double entropy_coef = 0.0;
  std::optional<double> target_entropy;  // unset: entropy_coef is constant
  double entropy_coef_delta = 0.005;
  double kl_loss_coef = 0.0;
  std::string kl_loss_type = "k3";
  double kl_ctl = 0.0;
  std::string kl_estimator = "k1";
  KlControlSettings kl_ctrl;
  int64_t ref_model_sync_steps = 0;  // 0: the reference model never changes
  double ref_model_mixup_alpha = 0.6;
  TeacherSettings teacher;

  // Whether a loss term or the reward uses a reference model.
  bool uses_reference() const { return kl_loss_coef != 0.0 || kl_ctl != 0.0; }

  template <class V>
  void visit(V& v) {
    const std::vector<std::string> losses = loss_names(), corrections = correction_names();
    v("loss", loss, "policy loss (docs/algorithms.md); sft: supervised fine-tuning",
      aliased({losses.begin(), losses.end()}, {{"grpo", "ppo"}}));
    v("eps_clip", eps_clip, "the ratio is clipped below 1 - eps_clip (unset: the loss's default; PPO: 0.2)",
      range(0.0, 1.0));
    v("eps_clip_higher", eps_clip_higher, "the ratio is clipped above 1 + eps_clip_higher (unset: eps_clip)",
      at_least(0.0));
    v("c_clip", c_clip, "PPO dual clip: for negative advantages the loss is at most -c_clip * A (unset: off)",
      above(1.0));
    v("sapo_tau_pos", sapo_tau_pos, "SAPO: steepness of the soft gate, positive advantages", above(0.0));
    v("sapo_tau_neg", sapo_tau_neg, "SAPO: steepness of the soft gate, other advantages", above(0.0));
    v("dppo_threshold", dppo_threshold, "DPPO: divergence above which a token is masked", at_least(0.0));
    v("clip_cov_ratio", clip_cov_ratio, "clip_cov: fraction of tokens whose loss becomes 0", range(0.0, 1.0));
    v("clip_cov_lb", clip_cov_lb, "clip_cov: covariance above which a token can be chosen");
    v("clip_cov_ub", clip_cov_ub, "clip_cov: covariance below which a token can be chosen");
    v("kl_cov_ratio", kl_cov_ratio, "kl_cov: fraction of tokens that get a KL term", range(0.0, 1.0));
    v("ppo_kl_coef", ppo_kl_coef, "kl_cov: weight of the KL term", at_least(0.0));
    v("use_decoupled_loss", use_decoupled_loss,
      "clip against pi_old, the policy at the start of the update, and weight by pi_old / behavior policy");
    v("recompute_logprob", recompute_logprob,
      "take pi_old from the trainer at the start of the update, not from the engine");
    v("prox_logp_method", prox_logp_method,
      "pi_old of the decoupled loss: recompute (forward pass); loglinear (interpolated between engine and "
      "trainer by token version, no pass); metrics (recompute, and report the error of loglinear); "
      "reuse_train_logp (from the training pass, one mini-batch only)",
      one_of({"recompute", "loglinear", "metrics", "reuse_train_logp"}));
    v("correction", correction,
      "correction for sampling with the engine's policy and not pi_old; auto: rejection_sampling if set, "
      "otherwise the cap of the decoupled loss",
      one_of({corrections.begin(), corrections.end()}));
    v("correction_level", correction_level,
      "tis, masked_is, rejection: weight of the token, or the sequence's product or geometric mean",
      one_of({"token", "sequence", "geometric"}));
    v("correction_lower", correction_lower, "lower bound of the weight (unset: the correction's default)",
      at_least(0.0));
    v("correction_upper", correction_upper, "upper bound of the weight (unset: the correction's default)",
      above(0.0));
    v("correction_veto", correction_veto,
      "masked_is, rejection: a token with a weight below this drops its sequence; 0: off", range(0.0, 1.0));
    v("behave_imp_weight_cap", behave_imp_weight_cap,
      "decoupled loss: tokens with an importance weight above this are masked (null: no cap)", above(0.0));
    v("rejection_sampling", rejection_sampling, "AReaL's settings of the correction");
    v("off_policy_mask_threshold", off_policy_mask_threshold,
      "mask tokens with A < 0 in sequences whose mean of log mu - log pi is above this (unset: off)");
    v("m2_threshold", m2_threshold,
      "M2PO: mask the tokens furthest from mu until the mean squared log ratio is below this (unset: off)",
      above(0.0));
    v("obrs_lambda", obrs_lambda, "obrs: a token is kept with probability min(1, pi_old / (lambda mu))",
      above(0.0));
    v("obrs_normalizer", obrs_normalizer,
      "obrs, the fraction Z of a context's samples that is kept: rest (the engine's top-k tokens, and a term "
      "for all others), scaled (the top-k tokens times one factor; the bound of the weight is then Z times "
      "correction_upper), or none (weights without Z: no top-k tokens, and no forward pass of its own)",
      one_of({"rest", "scaled", "none"}));
    v("entropy_coef", entropy_coef, "weight of the entropy bonus: the loss gets -entropy_coef * H",
      at_least(0.0));
    v("target_entropy", target_entropy,
      "adaptive entropy bonus: applied only if the previous step's entropy was at most this; its "
      "coefficient then rises, otherwise it falls (unset: the coefficient is constant)",
      at_least(0.0));
    v("entropy_coef_delta", entropy_coef_delta, "target_entropy: change of the coefficient per step",
      at_least(0.0));
    v("kl_loss_coef", kl_loss_coef, "weight of the KL to the reference model in the loss", at_least(0.0));
    v("kl_loss_type", kl_loss_type,
      "the KL in the loss at a position: k2, k3 or unbiased (k3 times pi / pi_old) estimate it from the "
      "sampled token; topk computes it over the gconfig.top_logprobs most likely tokens and the rest",
      one_of({"k2", "k3", "unbiased", "topk"}));
    v("kl_ctl", kl_ctl, "weight of the KL to the reference model in the reward of each token", at_least(0.0));
    v("kl_estimator", kl_estimator, "estimator of the KL in the reward", one_of({"k1", "k2", "k3"}));
    v("kl_ctrl", kl_ctrl, "control of kl_ctl over the steps");
    v("ref_model_sync_steps", ref_model_sync_steps,
      "number of steps between updates of the reference model from the policy; 0: never", at_least(0));
    v("ref_model_mixup_alpha", ref_model_mixup_alpha,
      "weight of the policy in the updated reference model; the rest is the old reference", range(0.0, 1.0));
    v("teacher", teacher, "on-policy distillation");
  }
};

// Denominators of a loss (aggregation.h).
struct AggregationSettings {
  std::string loss_aggregation = "auto";
  int64_t loss_constant_length = 0;  // tokens; usually gconfig.max_new_tokens

  template <class V>
  void visit(V& v) {
    v("loss_aggregation", loss_aggregation,
      "average over the losses of tokens; auto: as the loss was published, otherwise token_mean",
      one_of({"auto", "token_mean", "sequence_mean", "constant_length", "group_mean"}));
    v("loss_constant_length", loss_constant_length,
      "constant_length: divisor in tokens (usually the largest response length)", at_least(0));
  }
};

}  // namespace bough
