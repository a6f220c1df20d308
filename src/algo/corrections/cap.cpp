// The default correction of the decoupled loss (AReaL, equation 5): w if w <= behave_imp_weight_cap, else 0.
// The cap defaults to 5.
#include "algo/corrections/corrections.h"

namespace bough {

CorrectionKind cap_correction(const LossSettings&) {
  return {.apply = [](const CorrectionRows& rows) -> Corrected {
    const at::Tensor w_R = rows.log_w_R.exp();
    if (!rows.settings.behave_imp_weight_cap) return {w_R, {}};
    return {w_R.masked_fill(w_R.gt(*rows.settings.behave_imp_weight_cap), 0.0), {}};
  }};
}

}  // namespace bough
