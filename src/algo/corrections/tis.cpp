// Truncated importance sampling (FlashRL; Yao et al. 2025): min(w, correction_upper), default 2. w is taken
// per token, as the sequence's product, or as its geometric mean. correction_lower (default 0) is a lower
// bound of the result.
#include "algo/corrections/corrections.h"

namespace bough {

CorrectionKind tis_correction(const LossSettings& settings) {
  return {
      .coupling = settings.correction_level != "token" ? CouplingScope::kSequence : CouplingScope::kNothing,
      .bounds = weight_bounds(settings, {0.0, 2.0}, {0.0, 2.0}),
      .apply = [](const CorrectionRows& rows) -> Corrected {
        const auto [lower, upper] = rows.bounds;
        const at::Tensor w_R = log_weight_at_level(rows).exp();
        return {w_R.clamp(lower, upper), w_R.gt(upper).logical_or(w_R.lt(lower))};
      }};
}

}  // namespace bough
