// Policy gradient (Williams 1992): -A log pi.
#include "algo/losses/policy_terms.h"

namespace bough {

PolicyTermKind pg_term() {
  return {.against = Against::kNothing, .term = [](const PolicyRows& rows) -> PolicyTerm {
            return {rows.advantages_R.mul(rows.log_probs_R).neg(), {}};
          }};
}

}  // namespace bough
