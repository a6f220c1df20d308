// Masked importance sampling and rejection (verl's rollout correction). w is taken per token, as the
// sequence's product, or as its geometric mean. With lo, hi = correction_lower, correction_upper (defaults
// 0.5 and 2; geometric: 0.9999 and 1.0001):
//   masked_is  w if lo <= w <= hi, else 0
//   rejection  1 if lo <= w <= hi, else 0
// Every token of a sequence gets 0 if any trained token of the sequence has w below correction_veto (default
// 1e-4; 0 turns the veto off).
#include "algo/corrections/corrections.h"

namespace bough {

namespace {

// 1 for accepted loss rows, otherwise 0.
at::Tensor accepted(const CorrectionRows& rows, const at::Tensor& w_R) {
  const auto [lower, upper] = rows.bounds;
  const at::Tensor inside_R = w_R.ge(lower).logical_and(w_R.le(upper));
  return inside_R.to(w_R.scalar_type()).mul(veto_factor(rows));
}

CorrectionKind kind(const LossSettings& settings, Corrected (*apply)(const CorrectionRows&)) {
  return {.coupling = settings.correction_level != "token" || settings.correction_veto > 0.0
                          ? CouplingScope::kSequence
                          : CouplingScope::kNothing,
          .bounds = weight_bounds(settings, {0.5, 2.0}, {0.9999, 1.0001}),
          .apply = apply};
}

}  // namespace

CorrectionKind masked_is_correction(const LossSettings& settings) {
  return kind(settings, [](const CorrectionRows& rows) -> Corrected {
    const at::Tensor w_R = log_weight_at_level(rows).exp();
    return {w_R.mul(accepted(rows, w_R)), {}};
  });
}

CorrectionKind rejection_correction(const LossSettings& settings) {
  return kind(settings, [](const CorrectionRows& rows) -> Corrected {
    return {accepted(rows, log_weight_at_level(rows).exp()), {}};
  });
}

}  // namespace bough
