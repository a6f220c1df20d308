#include "train/acceptance.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

namespace bough {
namespace {

Trajectory drawn_row(size_t tokens, int32_t version = 0) {
  Trajectory row;
  row.input_ids.assign(tokens, 1);
  row.loss_mask.assign(tokens, 1);
  row.loss_mask[0] = 0;
  row.logprobs.assign(tokens, -1);
  row.versions.assign(tokens, version);
  row.advantage = {1};
  return row;
}

MetricValues metrics_of(const std::vector<Trajectory>& samples, const DenseValues& dense) {
  std::vector<const Trajectory*> rows;
  for (const Trajectory& sample : samples) rows.push_back(&sample);
  return acceptance_metrics(rows, make_batch(samples, {}, at::kDouble), dense);
}

// A token whose dense probability is a half or a fourth of its mu has the acceptance 1/2 or 1/4. All other
// tokens have the acceptance 1.
TEST(Acceptance, SampledOneIsCountedByPlaceAndRow) {
  at::Tensor dense_R = at::full({399}, -1 + std::log(0.5), at::kDouble);
  dense_R.narrow(0, 256, 143).fill_(-1 + std::log(0.25));
  dense_R[0] = 0;  // more likely than under mu
  const MetricValues metrics = metrics_of({drawn_row(400)}, {dense_R});
  EXPECT_NEAR(metrics.at("sparse/acceptance_to_255"), (1 + 255 * 0.5) / 256, 1e-9);
  EXPECT_NEAR(metrics.at("sparse/acceptance_to_1023"), 0.25, 1e-9);
  EXPECT_FALSE(metrics.contains("sparse/acceptance_to_4095"));
  EXPECT_NEAR(metrics.at("sparse/acceptance"), (1 + 255 * 0.5 + 143 * 0.25) / 399, 1e-9);
  EXPECT_NEAR(metrics.at("sparse/acceptance_p5"), metrics.at("sparse/acceptance"), 1e-12);
  EXPECT_FALSE(metrics.contains("sparse/overlap"));
}

// Mean and tails of the ratio. In every 100 tokens, 20 have ratio 1/2, 10 have ratio 2, and the rest have 1.
TEST(Acceptance, RatiosHaveTheirTailsByPlace) {
  at::Tensor dense_R = at::full({400}, -1.0, at::kDouble);
  for (int64_t r = 0; r < 400; ++r)
    if (r % 10 < 2) dense_R[r] = -1 + std::log(0.5);
    else if (r % 10 == 2) dense_R[r] = -1 + std::log(2.0);
  const MetricValues metrics = metrics_of({drawn_row(401)}, {dense_R});
  EXPECT_NEAR(metrics.at("sparse/ratio_to_1023"), 0.2 * 0.5 + 0.1 * 2 + 0.7, 0.02);
  EXPECT_NEAR(metrics.at("sparse/ratio_p5_to_255"), 0.5, 1e-9);
  EXPECT_NEAR(metrics.at("sparse/ratio_p95_to_255"), 2, 1e-9);
  EXPECT_FALSE(metrics.contains("sparse/ratio_p5_to_4095"));
}

// The overlap counts the top-k tokens one by one and all other tokens as one token. It is at least the exact
// sum over the vocabulary, and exceeds it by at most the probability of the other tokens. If k is the
// vocabulary's size, the overlap equals the sum.
TEST(Acceptance, OverlapIsTheSumOfTheSmallerProbabilities) {
  at::manual_seed(1);
  const at::Tensor mu_RV = at::randn({50, 40}, at::kDouble).mul(2).log_softmax(1);
  const at::Tensor pi_RV = mu_RV.add(at::randn({50, 40}, at::kDouble)).log_softmax(1);
  const at::Tensor whole_R = at::minimum(mu_RV.exp(), pi_RV.exp()).sum(1);
  EXPECT_LT((overlap_of(mu_RV, pi_RV) - whole_R).abs().max().item<double>(), 1e-12);
  double gap_before = 1;
  for (const int64_t k : {2, 8, 20}) {
    const auto [top_RK, ids_RK] = mu_RV.topk(k, 1);
    const at::Tensor top_k_RK = pi_RV.gather(1, ids_RK);
    const at::Tensor gap_R = overlap_of(top_RK, top_k_RK) - whole_R;
    const at::Tensor rest_R =
        at::minimum(top_RK.exp().sum(1).neg().add(1), top_k_RK.exp().sum(1).neg().add(1));
    EXPECT_GE(gap_R.min().item<double>(), -1e-12);
    EXPECT_LE((gap_R - rest_R).max().item<double>(), 1e-12);
    EXPECT_LT(gap_R.mean().item<double>(), gap_before);
    gap_before = gap_R.mean().item<double>();
  }
  // A padded column (log-probability -inf) adds nothing, whatever the policy's log-probability is.
  const auto [top_RK, ids_RK] = mu_RV.topk(3, 1);
  const at::Tensor filled = at::cat({top_RK, at::full({50, 1}, -INFINITY, at::kDouble)}, 1);
  const at::Tensor top_k_RK = pi_RV.gather(1, ids_RK);
  EXPECT_TRUE(overlap_of(filled, at::cat({top_k_RK, at::zeros({50, 1}, at::kDouble)}, 1))
                  .equal(overlap_of(top_RK, top_k_RK)));
}

TEST(Acceptance, OverlapHasMeanAndFifthPercentileByPlace) {
  at::Tensor overlap_R = at::full({399}, 0.9, at::kDouble);
  overlap_R.narrow(0, 0, 26).fill_(0.2);  // a tenth of the first range
  overlap_R.narrow(0, 256, 143).fill_(0.5);
  const at::Tensor dense_R = at::full({399}, -1.0, at::kDouble);
  const MetricValues metrics = metrics_of({drawn_row(400)}, {dense_R, overlap_R});
  EXPECT_NEAR(metrics.at("sparse/overlap_to_255"), (26 * 0.2 + 230 * 0.9) / 256, 1e-12);
  EXPECT_NEAR(metrics.at("sparse/overlap_p5_to_255"), 0.2, 1e-12);
  EXPECT_NEAR(metrics.at("sparse/overlap_p5_to_1023"), 0.5, 1e-12);
  EXPECT_NEAR(metrics.at("sparse/overlap_p5"), 0.2, 1e-12);
  EXPECT_NEAR(metrics.at("sparse/overlap"), (26 * 0.2 + 230 * 0.9 + 143 * 0.5) / 399, 1e-12);
}

// Tokens sampled with the trained version differ from the dense policy by sparse attention only. Tokens of
// older versions have a separate KL metric.
TEST(Acceptance, TheKlOfStaleTokensIsASeparateMetric) {
  const std::vector<Trajectory> samples = {drawn_row(101, 7), drawn_row(51, 5)};
  at::Tensor dense_R = at::full({150}, -1 + std::log(0.5), at::kDouble);
  dense_R.narrow(0, 100, 50).fill_(-1 + std::log(0.25));
  const MetricValues metrics = metrics_of(samples, {dense_R, {}, 7});
  EXPECT_NEAR(metrics.at("sparse/kl_drawn"), 0.5 - 1 + std::log(2.0), 1e-9);
  EXPECT_NEAR(metrics.at("staleness/kl"), 0.25 - 1 + std::log(4.0), 1e-9);
  EXPECT_FALSE(metrics_of(samples, {dense_R, {}, 5}).contains("staleness/kl"));
}

}  // namespace
}  // namespace bough
