#include "train/acceptance.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "algo/policy_rows.h"
#include "base/error.h"
#include "base/log.h"

namespace bough {

namespace {

constexpr std::array<int64_t, 3> kEnds = {256, 1024, 4096};
constexpr std::array<const char*, 4> kPlaces = {"_to_255", "_to_1023", "_to_4095", "_beyond"};
using Places = std::array<std::vector<double>, kPlaces.size()>;

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

// The `share` quantile. Reorders `values`.
double quantile(std::vector<double>& values, double share) {
  const auto rank =
      std::min(static_cast<int64_t>(share * static_cast<double>(values.size())), std::ssize(values) - 1);
  std::nth_element(values.begin(), values.begin() + rank, values.end());
  return values[static_cast<size_t>(rank)];
}

// For each loss row: which of the four ranges of response positions (kPlaces) has the row's token. Position 0
// is the first trained token of the row of the batch.
std::vector<size_t> places_of(const std::vector<const Trajectory*>& rows, const TrainBatch& batch) {
  std::vector<size_t> places;
  size_t sequence = 0;
  for (const Trajectory* row : rows) {
    if (!row->in_loss()) continue;
    const std::vector<int32_t>& positions = batch.trained_positions[sequence++];
    for (const int32_t position : positions)
      places.push_back(static_cast<size_t>(
          std::upper_bound(kEnds.begin(), kEnds.end(), position - positions[0]) - kEnds.begin()));
  }
  return places;
}

Places by_place(const at::Tensor& values_R, const std::vector<size_t>& places) {
  const at::Tensor own_R = values_R.contiguous();
  const double* const values = own_R.const_data_ptr<double>();
  Places out;
  for (size_t r = 0; r < places.size(); ++r) out[places[r]].push_back(values[r]);
  return out;
}

// The 5% quantile over responses of the response's mean acceptance.
double fifth_percentile_of_rows(const at::Tensor& accepted_R, const TrainBatch& batch) {
  std::vector<double> means;
  for (size_t s = 0; s + 1 < batch.row_offset.size(); ++s) {
    const int64_t begin = batch.row_offset[s], count = batch.row_offset[s + 1] - begin;
    if (count > 0) means.push_back(accepted_R.narrow(0, begin, count).mean().item<double>());
  }
  return quantile(means, 0.05);
}

// Mean of the k3 estimate over the loss rows where chosen_R is true. nullopt if there are none.
std::optional<double> kl_where(const at::Tensor& kl_R, const at::Tensor& chosen_R) {
  if (!chosen_R.any().item<bool>()) return {};
  return kl_R.masked_select(chosen_R).mean().item<double>();
}

}  // namespace

at::Tensor sampled_acceptance(const at::Tensor& behaviour_log_probs_R, const at::Tensor& log_probs_R) {
  return log_probs_R.to(at::kDouble).sub(behaviour_log_probs_R.to(at::kDouble)).clamp_max(0).exp();
}

at::Tensor overlap_of(const at::Tensor& behaviour_top_k_RK, const at::Tensor& top_k_log_probs_RK) {
  const at::Tensor mu_RK = behaviour_top_k_RK.to(at::kDouble).exp();
  const at::Tensor pi_RK =
      at::where(mu_RK.gt(0), top_k_log_probs_RK.to(at::kDouble).exp(), at::zeros_like(mu_RK));
  const at::Tensor rest_R = at::minimum(mu_RK.sum(1).neg().add(1), pi_RK.sum(1).neg().add(1))
                                .clamp_min(0);  // against rounding errors
  return at::minimum(mu_RK, pi_RK).sum(1).add(rest_R);
}

MetricValues acceptance_metrics(const std::vector<const Trajectory*>& rows, const TrainBatch& batch,
                                const DenseValues& dense) {
  MetricValues metrics;
  if (batch.num_rows() == 0) return metrics;
  const at::Tensor& behaviour_R = batch.fields.behaviour_log_probs_R;
  const std::vector<size_t> places = places_of(rows, batch);
  BOUGH_CHECK(std::ssize(places) == batch.num_rows() && dense.log_probs_R.numel() == batch.num_rows(),
              "got positions of ", places.size(), " tokens and log-probabilities of ",
              dense.log_probs_R.numel(), " for a batch of ", batch.num_rows());
  const at::Tensor accepted_R = sampled_acceptance(behaviour_R, dense.log_probs_R).contiguous();
  const at::Tensor log_w_R = log_ratio(dense.log_probs_R.to(at::kDouble), behaviour_R.to(at::kDouble));
  Places accepted = by_place(accepted_R, places), ratios = by_place(log_w_R.exp(), places);
  for (size_t i = 0; i < kPlaces.size(); ++i) {
    if (accepted[i].empty()) continue;
    const auto name = [&](const char* what) { return std::string("sparse/") + what + kPlaces[i]; };
    metrics[name("acceptance")] = mean(accepted[i]);
    metrics[name("ratio")] = mean(ratios[i]);
    metrics[name("ratio_p5")] = quantile(ratios[i], 0.05);
    metrics[name("ratio_p95")] = quantile(ratios[i], 0.95);
  }
  double acceptance = metrics["sparse/acceptance"] = accepted_R.mean().item<double>();
  metrics["sparse/acceptance_p5"] = fifth_percentile_of_rows(accepted_R, batch);
  if (dense.overlap_R.defined()) {
    Places overlap = by_place(dense.overlap_R, places);
    std::vector<double> all;
    for (size_t i = 0; i < kPlaces.size(); ++i) {
      if (overlap[i].empty()) continue;
      all.insert(all.end(), overlap[i].begin(), overlap[i].end());
      metrics[std::string("sparse/overlap") + kPlaces[i]] = mean(overlap[i]);
      metrics[std::string("sparse/overlap_p5") + kPlaces[i]] = quantile(overlap[i], 0.05);
    }
    acceptance = metrics["sparse/overlap"] = mean(all);
    metrics["sparse/overlap_p5"] = quantile(all, 0.05);
  }
  // Samples of the current version differ from the dense policy only by sparse attention. Older samples also
  // differ by the weights.
  const at::Tensor kl_R = log_w_R.exp().sub(1).sub(log_w_R);
  const at::Tensor& versions_R = batch.fields.versions_R;
  const at::Tensor current_R = versions_R.defined() && dense.version >= 0 ? versions_R.ge(dense.version)
                                                                          : at::ones_like(kl_R, at::kBool);
  if (const auto kl = kl_where(kl_R, current_R)) metrics["sparse/kl_drawn"] = *kl;
  if (const auto kl = kl_where(kl_R, current_R.logical_not())) metrics["staleness/kl"] = *kl;
  if (acceptance < kLeastAcceptance)
    log_warning(str(dense.overlap_R.defined() ? "sparse/overlap" : "sparse/acceptance", " is ", acceptance,
                    ", below ", kLeastAcceptance,
                    ": the policy that samples differs too much from the trained one; expected a larger "
                    "rollout.sparse.budget, or sparse_training.mode: distill with a larger kl_loss_coef"));
  return metrics;
}

}  // namespace bough
