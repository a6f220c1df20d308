#include "algo/metrics_by_age.h"

#include <ATen/ops/log.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <vector>

namespace bough {
namespace {

WeightedSums read_metrics_by_age(const at::Tensor& log_w_R, const at::Tensor& clipped_R,
                                 const at::Tensor& versions_R, int64_t version) {
  MetricReader reader;
  add_metrics_by_age(reader, log_w_R, clipped_R, versions_R, version);
  return reader.read();
}

TEST(MetricsByAge, EveryAgeHasItsBin) {
  const std::vector<int64_t> bins = {0, 1, 2, 3, 3, 4, 4, 4, 4, 5, 5};
  for (int64_t age = 0; age < std::ssize(bins); ++age)
    EXPECT_EQ(age_bin(age), bins[static_cast<size_t>(age)]) << age;
  EXPECT_EQ(age_bin(-1), 0);
  EXPECT_EQ(age_bin(1000), 5);
}

// Version 9 trains tokens of ages 0, 0, 1, 4, 3, 9. Expected values are computed by hand.
TEST(MetricsByAge, WeightsAndClipsOfEachBin) {
  const at::Tensor log_w_R = at::tensor(std::vector<double>{1.0, 2.0, 0.5, 3.0, 1.0, 4.0}, at::kDouble).log();
  const at::Tensor versions_R = at::tensor(std::vector<int32_t>{9, 9, 8, 5, 6, 0}, at::kInt);
  const at::Tensor clipped_R = at::tensor(std::vector<int64_t>{0, 1, 0, 1, 1, 0}, at::kLong).to(at::kBool);
  const WeightedSums metrics = read_metrics_by_age(log_w_R, clipped_R, versions_R, 9);
  EXPECT_EQ(metrics.size(), 4u * 3) << "four ages, three metrics";
  EXPECT_DOUBLE_EQ(metrics.at("age_0/importance_weight_mean").value(), 1.5);
  EXPECT_DOUBLE_EQ(metrics.at("age_0/importance_weight_square_mean").value(), 2.5);
  EXPECT_DOUBLE_EQ(metrics.at("age_0/clip_fraction").value(), 0.5);
  EXPECT_DOUBLE_EQ(metrics.at("age_1/clip_fraction").value(), 0);
  EXPECT_DOUBLE_EQ(metrics.at("age_3_to_4/importance_weight_mean").value(), 2);
  EXPECT_DOUBLE_EQ(metrics.at("age_3_to_4/importance_weight_square_mean").value(), 5);
  EXPECT_DOUBLE_EQ(metrics.at("age_3_to_4/clip_fraction").value(), 1);
  EXPECT_DOUBLE_EQ(metrics.at("age_9_up/importance_weight_mean").value(), 4);
  EXPECT_EQ(read_metrics_by_age(log_w_R, {}, versions_R, 9).count("age_0/clip_fraction"), 0u);
  // The metrics of parts of the rows add up to those of all rows.
  WeightedSums pieces;
  for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {1, 4}, {4, 6}})
    merge(pieces, read_metrics_by_age(log_w_R.slice(0, begin, end), clipped_R.slice(0, begin, end),
                                      versions_R.slice(0, begin, end), 9));
  ASSERT_EQ(pieces.size(), metrics.size());
  for (const auto& [name, metric] : metrics)
    EXPECT_DOUBLE_EQ(pieces.at(name).value(), metric.value()) << name;
}

}  // namespace
}  // namespace bough
