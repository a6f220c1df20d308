// CISPO (MiniMax-M1, 2025, equations 4 and 5): -sg(clip(r, 1 - eps_clip, 1 + eps_clip_higher)) A log pi. The
// clip bounds the weight, and every token keeps its gradient. Defaults 1 and 4: no lower bound, a cap of 5.
#include "algo/losses/policy_terms.h"

namespace bough {

PolicyTermKind cispo_term() {
  return {.eps_low = 1.0, .eps_high = 4.0, .term = [](const PolicyRows& rows) -> PolicyTerm {
            const at::Tensor ratio_R = rows.log_ratio_R.detach().exp();
            const at::Tensor weight_R = ratio_R.clamp(1.0 - rows.eps_low, 1.0 + rows.eps_high);
            return {weight_R.mul(rows.advantages_R).mul(rows.log_probs_R).neg(), weight_R.ne(ratio_R)};
          }};
}

}  // namespace bough
