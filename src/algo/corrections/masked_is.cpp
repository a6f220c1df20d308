// Masked importance sampling and rejection (verl's rollout correction): with w by token, by the sequence's
// product or by its geometric mean, and lo, hi = correction_lower, correction_upper [0.5, 2; geometric:
// 0.9999, 1.0001],
//   masked_is  w where lo <= w <= hi, else 0
//   rejection  1 where lo <= w <= hi, else 0
// and 0 for the whole of a sequence in which any trained token has w below correction_veto [1e-4; 0: off].
#include "algo/corrections/corrections.h"

namespace bough {

namespace {

// 1 or 0.
at::Tensor accepted(const CorrectionRows& rows, const at::Tensor& w_R) {
  const auto [lower, upper] = rows.bounds;
  const at::Tensor inside_R = w_R.ge(lower).logical_and(w_R.le(upper));
  return inside_R.to(w_R.scalar_type()).mul(veto_factor(rows));
}

CorrectionKind kind(const LossSettings& settings, Corrected (*apply)(const CorrectionRows&)) {
  return {.couples = settings.correction_level != "token" || settings.correction_veto > 0.0
                         ? Couples::kSequence
                         : Couples::kNothing,
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
