#include "algo/loss.h"

#include <cmath>
#include <iterator>

#include "algo/losses/policy_terms.h"
#include "algo/policy_loss.h"
#include "algo/sft_loss.h"
#include "base/error.h"

namespace bough {

namespace {

void check_rows_tensor(const LossRows& rows, const at::Tensor& tensor, const char* name, bool needed,
                       at::ScalarType dtype) {
  if (!tensor.defined()) {
    BOUGH_CHECK(!needed, "this loss needs ", name, ", got an undefined tensor");
    return;
  }
  BOUGH_CHECK(tensor.sizes() == rows.log_probs_R.sizes(), name, " has shape ", tensor.sizes(),
              ", log_probs_R ", rows.log_probs_R.sizes());
  BOUGH_CHECK(tensor.scalar_type() == dtype, name, " is ", tensor.scalar_type(), ", expected ", dtype);
  BOUGH_CHECK(tensor.device() == rows.log_probs_R.device(), name, " is on ", tensor.device(),
              ", log_probs_R on ", rows.log_probs_R.device());
}

void check_top_k(const LossRows& rows, const at::Tensor& tensor, const char* name, bool needed,
                 at::ScalarType dtype) {
  if (!tensor.defined()) {
    BOUGH_CHECK(!needed, "this loss needs ", name, ", got an undefined tensor");
    return;
  }
  BOUGH_CHECK(tensor.dim() == 2 && tensor.size(0) == rows.log_probs_R.numel() &&
                  tensor.scalar_type() == dtype && tensor.device() == rows.log_probs_R.device(),
              name, " is ", tensor.sizes(), " ", tensor.scalar_type(), ", expected [R, K] ", dtype,
              " for rows ", rows.log_probs_R.sizes());
}

void expect(bool holds, const char* key, double value, const char* expected) {
  if (!holds || !std::isfinite(value))
    throw UserError(str("setting ", key, ": got ", value, ", expected a number ", expected));
}

// The settings visitor checks settings from a file. Settings that C++ or Python code fills in are checked
// only here.
void check_settings(const LossSettings& settings) {
  const double higher = settings.eps_clip_higher.value_or(0.0);
  const double c_clip = settings.c_clip.value_or(3.0);
  const double cap = settings.behave_imp_weight_cap.value_or(5.0);
  const double eps_clip = settings.eps_clip.value_or(0.2);
  expect(eps_clip >= 0.0 && eps_clip <= 1.0, "eps_clip", eps_clip, "from 0 to 1");
  expect(higher >= 0.0, "eps_clip_higher", higher, "at least 0");
  expect(c_clip > 1.0, "c_clip", c_clip, "above 1");
  expect(cap > 0.0, "behave_imp_weight_cap", cap, "above 0");
  expect(settings.entropy_coef >= 0.0, "entropy_coef", settings.entropy_coef, "at least 0");
  expect(settings.kl_loss_coef >= 0.0, "kl_loss_coef", settings.kl_loss_coef, "at least 0");
  settings.rejection_sampling.check();
  const std::string& level = settings.correction_level;
  if (level != "token" && level != "sequence" && level != "geometric")
    throw UserError(
        str("setting correction_level: got ", quoted(level), ", expected token, sequence or geometric"));
  const std::string& method = settings.prox_logp_method;
  if (method != "recompute" && method != "loglinear" && method != "metrics" && method != "reuse_train_logp")
    throw UserError(str("setting prox_logp_method: got ", quoted(method),
                        ", expected recompute, loglinear, metrics or reuse_train_logp"));
  if (method != "recompute" && !settings.use_decoupled_loss)
    throw UserError(str("setting prox_logp_method: got ", method,
                        ", which only the decoupled loss uses, but use_decoupled_loss is false; set it to "
                        "true, or leave prox_logp_method out"));
  const std::string& kl = settings.kl_loss_type;
  if (kl != "k2" && kl != "k3" && kl != "unbiased" && kl != "topk")
    throw UserError(str("setting kl_loss_type: got ", quoted(kl),
                        ", expected k2, k3, unbiased or topk (k1 has no expected gradient in the loss)"));
  expect(settings.kl_ctl >= 0.0, "kl_ctl", settings.kl_ctl, "at least 0");
  expect(settings.obrs_lambda > 0.0, "obrs_lambda", settings.obrs_lambda, "above 0");
  const std::string& normalizer = settings.obrs_normalizer;
  if (normalizer != "rest" && normalizer != "scaled" && normalizer != "none")
    throw UserError(
        str("setting obrs_normalizer: got ", quoted(normalizer), ", expected rest, scaled or none"));
  if (settings.kl_ctrl.type == "adaptive" && settings.kl_ctl == 0.0)
    throw UserError(
        "setting kl_ctrl.type: got adaptive, but kl_ctl is 0; expected kl_ctl above 0 as the first value");
  if (settings.ref_model_sync_steps > 0 && !settings.uses_reference())
    throw UserError(
        "setting ref_model_sync_steps: there is no reference model to update; set kl_loss_coef or kl_ctl "
        "above 0, or leave it out");
}

struct NamedTerm {
  const char* name;
  PolicyTermKind (*make)();
};
#define BOUGH_LIST_POLICY_LOSS(name) {#name, name##_term},
constexpr NamedTerm kPolicyLosses[] = {BOUGH_POLICY_LOSSES(BOUGH_LIST_POLICY_LOSS)};
#undef BOUGH_LIST_POLICY_LOSS

}  // namespace

std::vector<std::string> loss_names() {
  std::vector<std::string> names;
  for (const NamedTerm& known : kPolicyLosses) names.emplace_back(known.name);
  names.emplace_back("sft");
  return names;
}

std::unique_ptr<Loss> make_loss(const LossSettings& settings) {
  check_settings(settings);
  if (settings.loss == "sft") return std::make_unique<SftLoss>();
  // GRPO is PPO clip with group-relative advantages. The advantages have their own setting.
  const std::string name = settings.loss == "grpo" ? "ppo" : settings.loss;
  for (const NamedTerm& known : kPolicyLosses)
    if (name == known.name) return std::make_unique<PolicyLoss>(settings, known.make());
  std::string names;
  std::vector<const char*> known;
  for (const NamedTerm& term : kPolicyLosses) known.push_back(term.name);
  known.push_back("sft");
  for (const char* each : known) names += str(names.empty() ? "" : ", ", each);
  const std::string near = nearest(settings.loss, known.data(), known.data() + known.size());
  throw UserError(str("setting loss: unknown loss ", quoted(settings.loss), ", expected one of ", names,
                      near.empty() ? "" : str("; did you mean '", near, "'?")));
}

void check_rows(const Loss& loss, const LossRows& rows) {
  const at::Tensor& log_probs_R = rows.log_probs_R;
  BOUGH_CHECK(log_probs_R.defined() && log_probs_R.dim() == 1,
              "log_probs_R must be defined and have one dimension");
  const at::ScalarType acc = log_probs_R.scalar_type();
  BOUGH_CHECK(acc == at::kFloat || acc == at::kDouble, "log_probs_R is ", acc, ", expected fp32 or fp64");
  const bool needs_proximal = loss.needs_proximal() && !rows.proximal_is_current;
  check_rows_tensor(rows, rows.weights_R, "weights_R", true, acc);
  check_rows_tensor(rows, rows.entropies_R, "entropies_R", loss.needs_entropy(), acc);
  check_rows_tensor(rows, rows.advantages_R, "advantages_R", loss.needs_advantages(), acc);
  check_rows_tensor(rows, rows.behaviour_log_probs_R, "behaviour_log_probs_R", loss.needs_behaviour(), acc);
  check_rows_tensor(rows, rows.proximal_log_probs_R, "proximal_log_probs_R", needs_proximal, acc);
  check_rows_tensor(rows, rows.reference_log_probs_R, "reference_log_probs_R", loss.needs_reference(), acc);
  check_rows_tensor(rows, rows.teacher_log_probs_R, "teacher_log_probs_R", loss.needs_teacher(), acc);
  const TopKTokens top_k = loss.top_k_tokens();
  const bool by_engine = top_k == TopKTokens::kEngineTop;
  const bool needs_reference_top_k = loss.needs_reference_top_k();
  check_top_k(
      rows, rows.top_k_log_probs_RK, "top_k_log_probs_RK",
      top_k == TopKTokens::kPolicyTop || needs_reference_top_k || (by_engine && rows.proximal_is_current),
      acc);
  check_top_k(rows, rows.reference_top_k_RK, "reference_top_k_RK", needs_reference_top_k, acc);
  check_top_k(rows, rows.teacher_top_k_RK, "teacher_top_k_RK", top_k == TopKTokens::kPolicyTop, acc);
  check_top_k(rows, rows.behaviour_top_k_RK, "behaviour_top_k_RK", by_engine, acc);
  check_top_k(rows, rows.proximal_top_k_RK, "proximal_top_k_RK", by_engine && !rows.proximal_is_current, acc);
  check_rows_tensor(rows, rows.versions_R, "versions_R", loss.needs_versions(), at::kInt);
  check_rows_tensor(rows, rows.sequences_R, "sequences_R", !loss.token_separable(), at::kLong);
  check_rows_tensor(rows, rows.rows_R, "rows_R", loss.needs_rows(), at::kLong);
}

}  // namespace bough
