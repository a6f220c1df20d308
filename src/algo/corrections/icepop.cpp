// IcePop (Ring-1T, 2025), per token: w if correction_lower <= w <= correction_upper (defaults 0.5 and 5),
// else 0.
#include "algo/corrections/corrections.h"

namespace bough {

CorrectionKind icepop_correction(const LossSettings& settings) {
  return {.bounds = weight_bounds(settings, {0.5, 5.0}, {0.5, 5.0}),
          .apply = [](const CorrectionRows& rows) -> Corrected {
            const auto [lower, upper] = rows.bounds;
            const at::Tensor w_R = rows.log_w_R.exp();
            return {w_R.masked_fill(w_R.lt(lower).logical_or(w_R.gt(upper)), 0.0), {}};
          }};
}

}  // namespace bough
