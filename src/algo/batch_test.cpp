// Arithmetic on whole batches: aggregation weights, mini-batches, merging of metrics.
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <set>

#include "algo/aggregation.h"
#include "algo/minibatches.h"
#include "algo/weighted_sum.h"
#include "base/error.h"

namespace bough {
namespace {

struct Batch {
  std::vector<int64_t> groups, trained;
  std::vector<std::vector<double>> values;  // one number per trained token
};

Batch random_batch(int seed) {
  std::mt19937_64 bits(seed);
  Batch batch;
  for (int s = 0; s < 23; ++s) {
    batch.groups.push_back(static_cast<int64_t>(bits() % 6) * 1000 - 7);
    batch.trained.push_back(s % 5 == 0 ? 0 : static_cast<int64_t>(bits() % 9));
    batch.values.emplace_back();
    for (int64_t t = 0; t < batch.trained.back(); ++t)
      batch.values.back().push_back(bits() % 1000 / 100.0 - 5.0);
  }
  return batch;
}

double weighted_total(const Batch& batch, const AggregationSettings& settings) {
  const std::vector<double> weights = sequence_weights(settings, batch.trained, batch.groups);
  double total = 0.0;
  for (size_t s = 0; s < weights.size(); ++s)
    for (const double value : batch.values[s]) total += weights[s] * value;
  return total;
}

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Computes each aggregation as its name says, as means of means. The code under test uses weights.
TEST(Aggregation, WeightsGiveTheMeansTheyAreNamedAfter) {
  for (int seed = 0; seed < 20; ++seed) {
    const Batch batch = random_batch(seed);
    std::vector<double> all, sequence_means, sequence_sums, group_means;
    std::map<int64_t, std::vector<double>> by_group;
    for (size_t s = 0; s < batch.values.size(); ++s) {
      const std::vector<double>& values = batch.values[s];
      if (values.empty()) continue;
      all.insert(all.end(), values.begin(), values.end());
      sequence_means.push_back(mean(values));
      sequence_sums.push_back(std::accumulate(values.begin(), values.end(), 0.0) / 64.0);
      std::vector<double>& group = by_group[batch.groups[s]];
      group.insert(group.end(), values.begin(), values.end());
    }
    for (const auto& [group, values] : by_group) group_means.push_back(mean(values));
    EXPECT_NEAR(weighted_total(batch, {"token_mean"}), mean(all), 1e-12);
    EXPECT_NEAR(weighted_total(batch, {"sequence_mean"}), mean(sequence_means), 1e-12);
    EXPECT_NEAR(weighted_total(batch, {"constant_length", 64}), mean(sequence_sums), 1e-12);
    EXPECT_NEAR(weighted_total(batch, {"group_mean"}), mean(group_means), 1e-12);
  }
}

TEST(Aggregation, NothingTrainedGivesZeros) {
  const std::vector<int64_t> none(4, 0), groups{0, 0, 1, 1};
  for (const char* how : {"token_mean", "sequence_mean", "constant_length", "group_mean"}) {
    EXPECT_EQ(sequence_weights({how, 8}, none, groups), std::vector<double>(4, 0.0)) << how;
    EXPECT_TRUE(sequence_weights({how, 8}, {}, {}).empty()) << how;
  }
}

TEST(Aggregation, BadSettingsAreNamed) {
  const std::vector<int64_t> one{1};
  EXPECT_THROW(sequence_weights({"token_means"}, one, one), UserError);
  EXPECT_THROW(sequence_weights({"constant_length", 0}, one, one), UserError);
}

TEST(Aggregation, ExpandsToRows) {
  const std::vector<double> weights{0.5, 0.0, 0.25};
  const std::vector<int64_t> sequences{0, 0, 2, 2, 0};
  const at::Tensor sequences_R = at::tensor(at::ArrayRef<int64_t>(sequences), at::kLong);
  const at::Tensor weights_R = expand_to_rows(weights, sequences_R, at::kFloat);
  EXPECT_EQ(weights_R.scalar_type(), at::kFloat);
  const std::vector<float> expected{0.5f, 0.5f, 0.25f, 0.25f, 0.5f};
  EXPECT_EQ(std::vector<float>(weights_R.const_data_ptr<float>(), weights_R.const_data_ptr<float>() + 5),
            expected);
  EXPECT_EQ(expand_to_rows(weights, sequences_R.slice(0, 0, 0), at::kFloat).numel(), 0);
  EXPECT_THROW(expand_to_rows(weights, sequences_R.add(1), at::kFloat), InternalError);
  EXPECT_THROW(expand_to_rows(weights, sequences_R.sub(1), at::kFloat), InternalError);
}

TEST(Minibatches, PartitionByWholeGroupsBalanced) {
  std::mt19937_64 bits(1);
  for (int round = 0; round < 200; ++round) {
    const int num_sequences = static_cast<int>(bits() % 60);
    const int64_t wanted = 1 + static_cast<int64_t>(bits() % 6);
    std::vector<int64_t> groups, tokens;
    for (int s = 0; s < num_sequences; ++s) {
      groups.push_back(static_cast<int64_t>(bits() % 12));
      tokens.push_back(round % 4 == 0 ? 0 : static_cast<int64_t>(bits() % 500));
    }
    const auto minibatches = split_minibatches(groups, tokens, wanted);
    const std::set<int64_t> distinct(groups.begin(), groups.end());
    ASSERT_EQ(minibatches.size(), std::min<size_t>(distinct.size(), wanted));
    std::map<int64_t, size_t> home;
    std::map<int64_t, int64_t> group_tokens;
    std::vector<int> seen(num_sequences, 0);
    std::vector<int64_t> loads;
    for (size_t b = 0; b < minibatches.size(); ++b) {
      ASSERT_FALSE(minibatches[b].empty());
      ASSERT_TRUE(std::is_sorted(minibatches[b].begin(), minibatches[b].end()));
      loads.push_back(0);
      for (const int64_t s : minibatches[b]) {
        ++seen[s];
        loads[b] += tokens[s];
        group_tokens[groups[s]] += tokens[s];
        ASSERT_EQ(home.try_emplace(groups[s], b).first->second, b) << "a group was split";
      }
    }
    for (const int count : seen) ASSERT_EQ(count, 1);
    // A mini-batch is called a bin. The heaviest bin was the lightest when it received its last group. The
    // token counts of two bins therefore differ by at most the heaviest group.
    int64_t heaviest_group = 0;
    for (const auto& [group, count] : group_tokens) heaviest_group = std::max(heaviest_group, count);
    if (!loads.empty()) {
      const auto [low, high] = std::minmax_element(loads.begin(), loads.end());
      ASSERT_LE(*high - *low, heaviest_group);
    }
  }
}

TEST(Minibatches, KnownSplit) {
  // Groups have 90, 60, 50, 40 tokens. The split is 90 + 40 and 60 + 50.
  const std::vector<int64_t> groups{7, 3, 7, 9, 5}, tokens{40, 60, 50, 50, 40};
  const std::vector<std::vector<int64_t>> expected{{0, 2, 4}, {1, 3}};
  EXPECT_EQ(split_minibatches(groups, tokens, 2), expected);
  // With groups in order of appearance, the heavy last group would join the first one.
  const std::vector<int64_t> late_groups{5, 3, 7}, late_tokens{10, 10, 20};
  const std::vector<std::vector<int64_t>> late_expected{{2}, {0, 1}};
  EXPECT_EQ(split_minibatches(late_groups, late_tokens, 2), late_expected);
  EXPECT_THROW(split_minibatches(groups, tokens, 0), UserError);
}

TEST(WeightedSum, MergesByKind) {
  using Kind = WeightedSum::Kind;
  WeightedSum mean_metric{Kind::mean, 6.0, 3.0}, sum_metric{Kind::sum, 6.0, 3.0},
      max_metric{Kind::max, -6.0, 3.0};
  mean_metric.merge({Kind::mean, 4.0, 2.0});
  sum_metric.merge({Kind::sum, 4.0, 2.0});
  max_metric.merge({Kind::max, -7.0, 2.0});
  EXPECT_EQ(mean_metric.value(), 2.0);
  EXPECT_EQ(sum_metric.value(), 10.0);
  EXPECT_EQ(max_metric.value(), -6.0);

  WeightedSum empty{Kind::max, 0.0, 0.0};
  max_metric.merge(empty);  // must not raise a negative maximum to 0
  EXPECT_EQ(max_metric.value(), -6.0);
  empty.merge(max_metric);
  EXPECT_EQ(empty.value(), -6.0);
  EXPECT_EQ(WeightedSum{}.value(), 0.0);
  EXPECT_THROW(mean_metric.merge(sum_metric), InternalError);
}

}  // namespace
}  // namespace bough
