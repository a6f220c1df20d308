// Masks of 0 and 1. Each is multiplied with any other correction:
//   off_policy_mask_threshold (DeepSeek-V3.2; the name is TRL's; default off; paper: 0.5): in a sequence
//     whose mean of log mu - log pi over the trained tokens exceeds the threshold, tokens with A < 0 get 0.
//     These are bad answers that the policy would no longer give.
//   m2_threshold (M2PO; the name is AReaL's; default off): the tokens of the mini-batch with the largest
//     (log mu - log pi_old)^2 get 0 until the mean of the remaining tokens is below the threshold.
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros_like.h>

#include "algo/corrections/corrections.h"

namespace bough {

namespace {

Corrected mask_off_policy(const CorrectionRows& rows) {
  const at::Tensor distance_R = log_ratio(rows.behaviour_log_probs_R, rows.log_probs_R);
  const at::Tensor far_R =
      rows.sequences->to_rows(rows.sequences->mean(distance_R).gt(*rows.settings.off_policy_mask_threshold));
  const at::Tensor masked_R = far_R.logical_and(rows.advantages_R.lt(0.0));
  return {masked_R.logical_not().to(rows.log_w_R.scalar_type()), {}};
}

Corrected mask_second_moments(const CorrectionRows& rows) {
  const auto [ascending_R, order_R] = at::sort(rows.log_w_R.square());
  // The means of the first 1, 2, ... entries never decrease. The means below the threshold come first.
  const at::Tensor sums_R = ascending_R.cumsum(0);
  const at::Tensor counts_R = at::zeros_like(sums_R).add(1.0).cumsum(0);
  const at::Tensor kept_R =
      sums_R.div(counts_R).lt(*rows.settings.m2_threshold).to(rows.log_w_R.scalar_type());
  return {at::zeros_like(rows.log_w_R).index_copy(0, order_R, kept_R), {}};
}

}  // namespace

CorrectionKind off_policy_mask_correction(const LossSettings&) {
  return {.coupling = CouplingScope::kSequence, .apply = mask_off_policy};
}

CorrectionKind m2po_correction(const LossSettings&) {
  return {.coupling = CouplingScope::kBatch, .apply = mask_second_moments};
}

}  // namespace bough
