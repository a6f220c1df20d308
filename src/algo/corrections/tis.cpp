// Truncated importance sampling (FlashRL; Yao et al. 2025): min(w, correction_upper) [2], by token, by the
// sequence's product or by its geometric mean.
#include "algo/corrections/corrections.h"

namespace bough {

CorrectionKind tis_correction(const LossSettings& settings) {
  return {
      .couples_tokens = settings.correction_level != "token",
      .apply = [](const CorrectionRows& rows) -> Corrected {
        const WeightBounds bounds = weight_bounds(rows.settings, {0.0, 2.0}, {0.0, 2.0});
        const at::Tensor w_R = log_weight_at_level(rows).exp();
        return {w_R.clamp(bounds.lower, bounds.upper), w_R.gt(bounds.upper).logical_or(w_R.lt(bounds.lower))};
      }};
}

}  // namespace bough
