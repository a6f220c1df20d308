// GSPO (Zheng et al. 2025): one ratio per sequence, s = exp(mean over its trained tokens of log r), clipped
// as in PPO (defaults 3e-4 and 4e-4). Aggregation: the mean over sequences of token means.
// Token form (gspo_token): s_t = sg(s) pi / sg(pi). Its value is the same, and its gradient reaches token t
// only through A_t.
#include "algo/losses/policy_terms.h"

namespace bough {

namespace {

at::Tensor sequence_ratio(const PolicyRows& rows) {
  return rows.sequences->to_rows(rows.sequences->mean(rows.log_ratio_R).exp());
}

PolicyTermKind kind(PolicyTerm (*term)(const PolicyRows&)) {
  return {.coupling = CouplingScope::kSequence,
          .aggregation = "sequence_mean",
          .eps_low = 3e-4,
          .eps_high = 4e-4,
          .term = term};
}

}  // namespace

PolicyTermKind gspo_term() {
  return kind([](const PolicyRows& rows) { return clipped_surrogate(sequence_ratio(rows), rows); });
}

PolicyTermKind gspo_token_term() {
  return kind([](const PolicyRows& rows) {
    const at::Tensor one_R = rows.log_probs_R.sub(rows.log_probs_R.detach()).exp();
    return clipped_surrogate(sequence_ratio(rows).detach().mul(one_R), rows);
  });
}

}  // namespace bough
