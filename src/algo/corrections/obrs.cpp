// Optimal-budget rejection sampling (OBRS; Verine et al. 2024; Jackpot, Liu et al. 2025; equation 2 of
// DistillSparse). A token is kept with probability a = min(1, pi_old / (lambda mu)), lambda = obrs_lambda
// (default 1). Kept tokens have the distribution mu' = mu a / Z, with Z = sum over the vocabulary of mu a =
// sum of min(mu, pi_old / lambda), so pi_old / mu' = Z max(lambda, w). Equation 2, with pi_old in the place
// of pi as the paper allows, gives
//   factor = kept * F(pi_old / mu') * rows / kept rows,   F(x) = min(x, correction_upper), default 3
//
// The last quotient, rows / kept rows, changes the denominator from all loss rows to the kept ones: equation
// 2 removes rejected samples. Without it the loss would be Z times as large. If F cuts nothing, the mean of
// factor * f over samples of mu is the mean of f under pi_old. Tokens whose context has a smaller Z than
// others count less, as Z / (mean of Z), because fewer of them are kept.
//
// mu is known only for the engine's top-k tokens. Let z be the sum over these tokens, and u = min(mu, pi_old
// / lambda) of all other tokens together. Z lies between z and z + u. obrs_normalizer selects the estimate:
//   rest    Z = z + kappa u, with one kappa in [0, 1] for the batch: (mean of a - mean of z) / (mean of u).
//           The mean of a under mu is Z, so the mean of Z over the batch has no bias, except by the bounds
//           of kappa. The error of one token's Z is below its u. It is 0 if the list has the whole
//           vocabulary.
//   scaled  Z = kappa z, kappa = (mean of a) / (mean of z). The mean of Z has no bias, but Z of a token may
//           exceed 1, and has the noise of the mean of a even if the list has the whole vocabulary. F cuts
//           max(lambda, w), before the product with Z, so the bound of the weight is Z correction_upper.
//           This differs from equation 2.
//   none    factor = kept * F(max(lambda, w)), and the denominator remains all loss rows. a max(lambda, w) =
//           w, so the mean of factor * f over samples of mu is that of f under pi_old in each context, if F
//           cuts nothing. Contexts with a smaller Z do not count less. No value of another row is read, so
//           that no forward execution has to precede the one with gradients, and the engine need not return
//           top-k tokens.
// Jackpot's list also has pi_old's most likely tokens, but the engine does not return mu of those.
//
// The random numbers depend only on the trainer's version and the index of the loss row in the batch.
#include <ATen/ops/arange.h>
#include <ATen/ops/full_like.h>
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
at::Tensor sampled(const at::Tensor& probabilities_R, const CorrectionRows& rows) {
  const CounterRandom random(0, Purpose::acceptance);
  const at::Tensor index_R =
      rows.rows_R.defined() ? rows.rows_R.cpu().contiguous() : at::arange(probabilities_R.numel(), at::kLong);
  const int64_t* const index = index_R.const_data_ptr<int64_t>();
  std::vector<double> uniforms;
  for (int64_t i = 0; i < probabilities_R.numel(); ++i)
    uniforms.push_back(random.uniform(static_cast<uint64_t>(rows.version), static_cast<uint64_t>(index[i])));
  const at::Tensor uniforms_R =
      at::tensor(at::ArrayRef<double>(uniforms), at::kDouble).to(probabilities_R.device());
  return uniforms_R.lt(probabilities_R).to(probabilities_R.scalar_type());
}

at::Tensor divided(const at::Tensor& a, const at::Tensor& b, double if_zero) {
  return at::where(b.gt(0.0), a.div(at::where(b.gt(0.0), b, at::ones_like(b))), at::full_like(a, if_zero));
}

struct Normalizer {
  at::Tensor known_R, z_R;
};

// z and Z of the file's head.
Normalizer normalizer(const CorrectionRows& rows, const at::Tensor& acceptance_R) {
  const double lambda = rows.settings.obrs_lambda;
  const at::Tensor mu_RK = rows.behaviour_top_k_RK.exp();
  // Padding has probability 0 under mu, but repeats a token of pi_old.
  const at::Tensor pi_RK = rows.old_top_k_RK.exp().masked_fill(mu_RK.le(0.0), 0.0);
  const at::Tensor known_R = at::minimum(mu_RK, pi_RK.div(lambda)).sum(1);
  if (rows.settings.obrs_normalizer == "scaled")
    return {known_R, known_R.mul(divided(acceptance_R.mean(), known_R.mean(), 1.0))};
  const at::Tensor rest_R =
      at::minimum(mu_RK.sum(1).neg().add(1.0), pi_RK.sum(1).neg().add(1.0).div(lambda)).clamp_min(0.0);
  const at::Tensor kappa = divided(acceptance_R.sub(known_R).mean(), rest_R.mean(), 0.0).clamp(0.0, 1.0);
  return {known_R, known_R.add(rest_R.mul(kappa))};
}

Corrected accept_by_budget(const CorrectionRows& rows) {
  const double lambda = rows.settings.obrs_lambda, upper = rows.bounds.upper;
  const at::Tensor w_R = rows.log_w_R.exp();
  if (w_R.numel() == 0) return {w_R, {}};
  const at::Tensor acceptance_R = w_R.div(lambda).clamp_max(1.0);
  const at::Tensor kept_R = sampled(acceptance_R, rows);
  const at::Tensor larger_R = w_R.clamp_min(lambda);
  if (rows.settings.obrs_normalizer == "none")
    return {kept_R.mul(larger_R.clamp_max(upper)),
            kept_R.gt(0.0).logical_and(larger_R.gt(upper)),
            {{"mismatch/obrs_acceptance", acceptance_R}, {"mismatch/obrs_accepted", kept_R}}};
  const auto [known_R, z_R] = normalizer(rows, acceptance_R);
  const at::Tensor bound_R =
      rows.settings.obrs_normalizer == "scaled" ? z_R.mul(upper) : at::full_like(z_R, upper);
  const at::Tensor weight_R = z_R.mul(larger_R);
  const at::Tensor share = kept_R.mean();  // 0 if no row is kept; then every factor is 0
  return {kept_R.mul(at::minimum(weight_R, bound_R)).mul(divided(at::ones_like(share), share, 1.0)),
          kept_R.gt(0.0).logical_and(bound_R.lt(weight_R)),
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
  if (settings.obrs_normalizer != "rest" && bounds.upper < settings.obrs_lambda)
    throw UserError(str("setting correction_upper: got ", bounds.upper, ", expected at least obrs_lambda, ",
                        settings.obrs_lambda, ", the least weight of a token that obrs_normalizer ",
                        settings.obrs_normalizer, " keeps"));
  if (bounds.upper < 1.0)
    throw UserError(str("setting correction_upper: got ", bounds.upper,
                        ", expected at least 1 with correction obrs, the weight where mu and pi_old agree"));
  const bool has_z = settings.obrs_normalizer != "none";
  return {.coupling = has_z ? CouplingScope::kBatch : CouplingScope::kNothing,
          .bounds = bounds,
          .reads_top_k = has_z,
          .draws_by_row = !has_z,
          .apply = accept_by_budget};
}

}  // namespace bough
