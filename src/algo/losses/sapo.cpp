// SAPO (arXiv 2511.20347): -f(r) A with f(r) = 4/tau sigmoid(tau (r - 1)), a soft gate with f'(1) = 1. tau is
// sapo_tau_pos (default 1.0) if A > 0, else sapo_tau_neg (default 1.05). Aggregation: the mean over sequences
// of token means.
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>

#include "algo/losses/policy_terms.h"

namespace bough {

PolicyTermKind sapo_term() {
  return {.aggregation = "sequence_mean", .term = [](const PolicyRows& rows) -> PolicyTerm {
            const at::Tensor& a_R = rows.advantages_R;
            const at::Tensor tau_R = at::where(a_R.gt(0.0), at::full_like(a_R, rows.settings.sapo_tau_pos),
                                               at::full_like(a_R, rows.settings.sapo_tau_neg));
            const at::Tensor gate_R = tau_R.mul(rows.log_ratio_R.exp().sub(1.0)).sigmoid();
            return {gate_R.mul(4.0).div(tau_R).mul(a_R).neg(), {}};
          }};
}

}  // namespace bough
