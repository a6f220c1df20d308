#include "cost/rollout_cost.h"

#include <gtest/gtest.h>

#include <cmath>

namespace bough {
namespace {

CostModel model(const char* shape = "small") {
  return CostModel(built_in_profile("h100", "bf16"), named_model_shape(shape, "bf16"));
}

// The formula of Appendix B, with L_dense at least 0.
double h(double in, double out, double budget) {
  const double dense = std::max(0.0, std::min(out, budget - in));
  return (2 * in + dense) * dense + 2 * budget * std::max(0.0, out - dense);
}

double vector_bytes(const CostModel& costs) {
  const ModelShape& shape = costs.shape();
  return static_cast<double>(shape.num_kv_heads * shape.head_dim * shape.element_bytes);
}

// With one sample per group, attended keys and read bytes equal the appendix's formula. The cost model sums
// over passes and the appendix integrates, so they differ by half a key per pass.
TEST(RolloutCost, SingleSamplesFollowAppendixB) {
  const CostModel costs = model();
  const double layers = static_cast<double>(costs.shape().num_layers);
  struct Case {
    int64_t in, out, budget;
  };
  for (const Case& c : {Case{100, 900, 0}, Case{100, 900, 256}, Case{100, 900, 4096}, Case{600, 900, 256},
                        Case{256, 700, 256}, Case{0, 400, 128}}) {
    SparseAttention sparse{.dense_layers = 0};
    if (c.budget > 0) sparse.budgets = {{0, c.budget}};
    const RolloutCost cost =
        rollout_cost(costs, {{c.in, {c.out}}, {c.in, {c.out}}, {c.in, {c.out}}}, sparse, 64);
    const double budget = c.budget > 0 ? static_cast<double>(c.budget) : 1e9;
    const double expected = 3 * layers * h(c.in, c.out, budget) / 2;
    const double slack = 3 * layers * static_cast<double>(c.out) / 2;
    EXPECT_NEAR(cost.keys, expected, slack + 1) << c.in << " " << c.out << " " << c.budget;
    EXPECT_NEAR(cost.kv_bytes, 2 * vector_bytes(costs) * cost.keys, 1e-6 * cost.kv_bytes);
    EXPECT_EQ(cost.tokens, 3 * c.out);
    EXPECT_EQ(cost.passes, c.out);
    EXPECT_EQ(cost.summary_bytes > 0, c.budget > 0 && c.budget < c.in + c.out);
  }
}

// A prompt of a group is read once for all samples of the group. With page selection, a page that several
// samples select is read once.
TEST(RolloutCost, AGroupReadsItsPromptOnce) {
  const CostModel costs = model();
  const double layers = static_cast<double>(costs.shape().num_layers),
               unit = 2 * vector_bytes(costs) * layers;
  const std::vector<SampledGroup> shared = {{1000, {10, 10, 10, 10}}};
  std::vector<SampledGroup> distinct(4, {1000, {10}});
  const double own = 4 * 45;  // 0 to 9 generated keys per sample
  EXPECT_NEAR(rollout_cost(costs, shared, {}, 64).kv_bytes, unit * (10 * 1000 + own), 1);
  EXPECT_NEAR(rollout_cost(costs, distinct, {}, 64).kv_bytes, unit * (10 * 4000 + own), 1);
  const SparseAttention sparse{.budgets = {{0, 100}}, .dense_layers = 0};
  const double of_shared = rollout_cost(costs, shared, sparse, 64).kv_bytes / unit;
  const double of_distinct = rollout_cost(costs, distinct, sparse, 64).kv_bytes / unit;
  EXPECT_NEAR(of_distinct, 10 * 400, 1e-6 * of_distinct);
  const double f = 100.0 / 1000;  // in the first pass
  EXPECT_NEAR(of_shared, 10 * 1000 * (1 - std::pow(1 - f, 4)), 0.01 * of_shared);
  EXPECT_LT(of_shared, of_distinct);
}

TEST(RolloutCost, DenseLayersReadAllAndSummariesCost) {
  const CostModel costs = model("qwen3-0.6b");
  const std::vector<SampledGroup> groups(8, {64, {4000}});
  const auto of = [&](int64_t dense_layers, int64_t vectors = 1) {
    return rollout_cost(costs, groups, {{{0, 512}}, dense_layers, vectors}, 64);
  };
  const RolloutCost dense = rollout_cost(costs, groups, {}, 64);
  EXPECT_DOUBLE_EQ(of(costs.shape().num_layers).kv_bytes, dense.kv_bytes);
  EXPECT_EQ(of(costs.shape().num_layers).summary_bytes, 0);
  const double per_layer = (of(0).kv_bytes - dense.kv_bytes) / static_cast<double>(costs.shape().num_layers);
  EXPECT_NEAR(of(2).kv_bytes - of(0).kv_bytes, -2 * per_layer, 1e-6 * dense.kv_bytes);
  EXPECT_NEAR(of(0, 2).summary_bytes, 2 * of(0).summary_bytes, 1);
  // Per page of 16 tokens, one mean of 16 keys is a 32nd of the bytes of the keys and values.
  EXPECT_NEAR(of(0).summary_bytes / dense.kv_bytes, 1.0 / 32, 0.002);
  EXPECT_LT(of(2).seconds(), dense.seconds());
  EXPECT_EQ(of(2).product_seconds, dense.product_seconds);
  // If the context is within the budget, attention is dense.
  EXPECT_DOUBLE_EQ(rollout_cost(costs, groups, {{{0, 8192}}, 0}, 64).seconds(), dense.seconds());
}

TEST(RolloutCost, SamplesBeginWhenOthersEnd) {
  const CostModel costs = model();
  const RolloutCost cost = rollout_cost(costs, {{10, {5, 3}}, {10, {4, 0}}}, {}, 2);
  EXPECT_EQ(cost.tokens, 12);
  EXPECT_EQ(cost.passes, 7);  // samples of 5 (passes 1-5), 3 (1-3) and 4 tokens (4-7)
  EXPECT_GT(cost.prefill_seconds, 0);
}

}  // namespace
}  // namespace bough
