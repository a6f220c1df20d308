// GMPO (geometric-mean policy optimization, arXiv 2507.20673), with l = log r and s = sgn A:
//   -A exp(mean over the sequence's trained tokens of s min(s l, s clip(l, -eps_clip, eps_clip_higher)))
// Both clips default to 0.4 and apply to the log-ratio. Aggregation: the mean over sequences.
#include <ATen/ops/minimum.h>

#include "algo/losses/policy_terms.h"

namespace bough {

PolicyTermKind gmpo_term() {
  return {.coupling = CouplingScope::kSequence,
          .aggregation = "sequence_mean",
          .eps_low = 0.4,
          .eps_high = 0.4,
          .term = [](const PolicyRows& rows) -> PolicyTerm {
            const at::Tensor sign_R = rows.advantages_R.sign();
            const at::Tensor free_R = sign_R.mul(rows.log_ratio_R);
            const at::Tensor bounded_R = sign_R.mul(rows.log_ratio_R.clamp(-rows.eps_low, rows.eps_high));
            const at::Tensor counted_R = sign_R.mul(at::minimum(free_R, bounded_R));
            const Sequences& sequences = *rows.sequences;
            const at::Tensor ratio_R = sequences.to_rows(sequences.mean(counted_R).exp());
            return {ratio_R.mul(rows.advantages_R).neg(), bounded_R.detach().lt(free_R.detach())};
          }};
}

}  // namespace bough
