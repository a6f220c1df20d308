#include "algo/corrections/corrections.h"

#include <ATen/ops/ones_like.h>

#include "base/error.h"

namespace bough {

at::Tensor log_weight_at_level(const CorrectionRows& rows) {
  const std::string& level = rows.settings.correction_level;
  if (level == "token") return rows.log_w_R;
  const Sequences& sequences = *rows.sequences;
  const at::Tensor log_w_S = level == "sequence" ? sequences.sum(rows.log_w_R) : sequences.mean(rows.log_w_R);
  return sequences.to_rows(log_w_S.clamp(-kMaxLogRatio, kMaxLogRatio));
}

at::Tensor veto_factor(const CorrectionRows& rows) {
  if (rows.settings.correction_veto == 0.0) return at::ones_like(rows.log_w_R);
  const at::Tensor vetoed_R =
      rows.log_w_R.exp().lt(rows.settings.correction_veto).to(rows.log_w_R.scalar_type());
  return rows.sequences->to_rows(rows.sequences->largest(vetoed_R).eq(0.0).to(rows.log_w_R.scalar_type()));
}

WeightBounds weight_bounds(const LossSettings& settings, WeightBounds token, WeightBounds geometric) {
  const WeightBounds own = settings.correction_level == "geometric" ? geometric : token;
  const WeightBounds bounds{settings.correction_lower.value_or(own.lower),
                            settings.correction_upper.value_or(own.upper)};
  if (bounds.lower > bounds.upper)
    throw UserError(str("setting correction_lower: got weights from ", bounds.lower, " to ", bounds.upper,
                        " for correction ", settings.correction,
                        "; expected the lower bound below the upper one (set both)"));
  return bounds;
}

namespace {

using Make = CorrectionKind (*)(const LossSettings&);
struct NamedCorrection {
  const char* name;
  Make make;
};
#define BOUGH_LIST_CORRECTION(name) {#name, name##_correction},
constexpr NamedCorrection kCorrections[] = {BOUGH_CORRECTIONS(BOUGH_LIST_CORRECTION)};
#undef BOUGH_LIST_CORRECTION

[[noreturn]] void refuse(const std::string& what, const std::string& why) {
  throw UserError(str("setting ", what, ": ", why));
}

}  // namespace

std::vector<std::string> correction_names() {
  std::vector<std::string> names = {"auto", "none"};
  for (const NamedCorrection& known : kCorrections) names.emplace_back(known.name);
  return names;
}

std::vector<CorrectionKind> find_corrections(const LossSettings& settings, Against against) {
  const bool by_rejection_sampling = settings.rejection_sampling.says_anything();
  const bool is_auto = settings.correction == "auto";
  const bool by_weight = (!is_auto && settings.correction != "none") || by_rejection_sampling ||
                         settings.m2_threshold.has_value();
  const std::string name = settings.m2_threshold   ? "m2_threshold"
                           : by_rejection_sampling ? "rejection_sampling"
                           : by_weight             ? "correction"
                                                   : "off_policy_mask_threshold";
  if ((by_weight || settings.off_policy_mask_threshold) && against == Against::kBehaviour)
    refuse(name,
           str("loss ", settings.loss, " corrects for the engine's policy by itself; leave the setting out"));
  if (by_weight && !settings.use_decoupled_loss && !settings.recompute_logprob)
    refuse(name,
           "pi_old is the engine's policy (use_decoupled_loss and recompute_logprob are false), so there is "
           "nothing to correct; set one of them to true, or leave the setting out");
  if (by_rejection_sampling && !is_auto)
    refuse("correction",
           str(settings.correction, " and rejection_sampling are two corrections; leave one out"));
  const bool has_bounds = !is_auto && settings.correction != "none" && settings.correction != "cap";
  if (!has_bounds && (settings.correction_lower || settings.correction_upper))
    refuse(settings.correction_lower ? "correction_lower" : "correction_upper",
           str("correction ", settings.correction,
               " has no such bound; leave it out, or set another correction"));
  const bool has_level = settings.correction == "tis" || settings.correction == "masked_is" ||
                         settings.correction == "rejection";
  if (settings.correction_level != "token" && !has_level)
    refuse("correction_level", str("correction ", settings.correction, " works by token; expected token"));

  std::vector<CorrectionKind> found;
  if (by_rejection_sampling) {
    found.push_back(rejection_sampling_correction(settings));
  } else if (is_auto) {
    if (settings.use_decoupled_loss && against == Against::kOld) found.push_back(cap_correction(settings));
  } else if (settings.correction != "none") {
    Make make = nullptr;
    for (const NamedCorrection& known : kCorrections)
      if (settings.correction == known.name) make = known.make;
    if (!make) {
      std::string names;
      for (const std::string& known : correction_names()) names += str(names.empty() ? "" : ", ", known);
      refuse("correction", str("got ", quoted(settings.correction), ", expected one of ", names));
    }
    found.push_back(make(settings));
  }
  if (settings.off_policy_mask_threshold) found.push_back(off_policy_mask_correction(settings));
  if (settings.m2_threshold) found.push_back(m2po_correction(settings));
  return found;
}

}  // namespace bough
