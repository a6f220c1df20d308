// Optimal-budget rejection sampling (OBRS; Verine et al. 2024; Jackpot, Liu et al. 2025; equation 2 of
// distillsparse). A token is kept with probability a = min(1, pi_old / (lambda mu)), lambda = obrs_lambda
// (default 1). Kept tokens have the distribution mu' = mu a / Z, with Z = sum over the vocabulary of mu a =
// sum of min(mu, pi_old / lambda). Each kept token is weighted against mu':
//   factor = kept * Z * min(max(lambda, w), correction_upper) * rows / kept rows
// with pi_old / mu' = Z max(lambda, w). correction_upper defaults to 3.
//
// The last quotient, rows / kept rows, changes the denominator from all loss rows to the kept ones. Without
// it the loss would be Z times as large.
//
// Z is known only over the engine's top-k tokens: Z = kappa * sum over the top-k tokens of min(mu, pi_old /
// lambda). kappa = (mean of a) / (mean of that sum), both over the batch's loss rows, since the mean of a
// under mu is Z. So kappa - 1 stands for the tokens outside the top k. Jackpot's sum also runs over pi_old's
// most likely tokens, but the engine does not return its probabilities of those.
//
// The random numbers depend only on the trainer's version and the index of the loss row in the batch.
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>

#include <vector>

#include "algo/corrections/corrections.h"
#include "base/error.h"
#include "base/random.h"

namespace bough {

namespace {

// Per loss row: 1 if its uniform random number is below `probabilities_R`, otherwise 0.
at::Tensor sampled(const at::Tensor& probabilities_R, int64_t version) {
  const CounterRandom random(0, Purpose::acceptance);
  std::vector<double> uniforms;
  for (int64_t row = 0; row < probabilities_R.numel(); ++row)
    uniforms.push_back(random.uniform(static_cast<uint64_t>(version), static_cast<uint64_t>(row)));
  const at::Tensor uniforms_R =
      at::tensor(at::ArrayRef<double>(uniforms), at::kDouble).to(probabilities_R.device());
  return uniforms_R.lt(probabilities_R).to(probabilities_R.scalar_type());
}

Corrected accept_by_budget(const CorrectionRows& rows) {
  const double lambda = rows.settings.obrs_lambda;
  const at::Tensor w_R = rows.log_w_R.exp();
  if (w_R.numel() == 0) return {w_R, {}};
  const at::Tensor acceptance_R = w_R.div(lambda).clamp_max(1.0);
  const at::Tensor kept_R = sampled(acceptance_R, rows.version);
  const at::Tensor known_R =
      at::minimum(rows.behaviour_top_k_RK.exp(), rows.old_top_k_RK.exp().div(lambda)).sum(1);
  // If the mean is 0, the top-k tokens say nothing about Z, and kappa is 1.
  const at::Tensor mean = known_R.mean();
  const at::Tensor kappa = at::where(mean.gt(0.0), acceptance_R.mean().div(mean), at::ones_like(mean));
  const at::Tensor z_R = known_R.mul(kappa);
  const at::Tensor weight_R = w_R.clamp_min(lambda);
  const at::Tensor cut_R = weight_R.clamp_max(rows.bounds.upper);
  const at::Tensor share = kept_R.mean();  // 0 if no row is kept; then every factor is 0
  const at::Tensor factor_R =
      kept_R.mul(z_R).mul(cut_R).div(at::where(share.gt(0.0), share, at::ones_like(share)));
  return {factor_R,
          kept_R.gt(0.0).logical_and(cut_R.lt(weight_R)),
          {{"mismatch/obrs_acceptance", acceptance_R},
           {"mismatch/obrs_accepted", kept_R},
           {"mismatch/obrs_z", z_R},
           {"mismatch/obrs_topk_error", acceptance_R.sub(known_R)}}};
}

}  // namespace

CorrectionKind obrs_correction(const LossSettings& settings) {
  const WeightBounds bounds = weight_bounds(settings, {0.0, 3.0}, {0.0, 3.0});
  if (settings.correction_lower)
    throw UserError(
        "setting correction_lower: obrs drops tokens at random and has no lower bound; leave it out");
  if (bounds.upper < settings.obrs_lambda)
    throw UserError(str("setting correction_upper: got ", bounds.upper, ", expected at least obrs_lambda, ",
                        settings.obrs_lambda, ", the least weight of a token that correction obrs keeps"));
  return {
      .coupling = CouplingScope::kBatch, .bounds = bounds, .reads_top_k = true, .apply = accept_by_budget};
}

}  // namespace bough
