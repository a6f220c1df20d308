#include "algo/value_loss.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"

namespace bough {
namespace {

at::Tensor column(std::initializer_list<double> values) {
  return at::tensor(at::ArrayRef<double>(values.begin(), values.size()), at::kDouble);
}

std::vector<double> value_list(const at::Tensor& x) {
  return {x.const_data_ptr<double>(), x.const_data_ptr<double>() + x.numel()};
}

double loss_of(const ValueLoss& loss) {
  return loss.output.loss.item<double>();
}

// Row 0: V is inside the clip range. In rows 1 to 3, V is outside. Row 1: the clipped V is further from G
// than V. Row 2: nearer to G. Row 3: nearer to G, but on the other side of G.
ValueRows rows() {
  return {.values_R = column({1.2, 2.0, 2.0, -3.0}),
          .old_values_R = column({1.0, 1.0, 1.0, 1.0}),
          .returns_R = column({3.0, 3.0, 1.0, -1.0}),
          .weights_R = column({0.1, 0.2, 0.3, 0.4})};
}

TEST(ValueLoss, TakesTheLargerTermOfTheTwo) {
  const ValueLoss got = value_loss(rows(), 0.5);
  // In each row, the error of larger magnitude counts. Row 0: -1.8, V's and the clipped V's. Row 1: the
  // clipped V's -1.5, not V's -1. Row 2: V's 1, not the clipped V's 0.5. Row 3: V's -2, not the clipped V's
  // 1.5.
  const double expected = 0.5 * (0.1 * 1.8 * 1.8 + 0.2 * 1.5 * 1.5 + 0.3 * 1 + 0.4 * 4);
  EXPECT_NEAR(loss_of(got), expected, 1e-12);
  EXPECT_NEAR(got.output.metrics.at("critic/loss").value(), expected, 1e-12);
  EXPECT_EQ(got.output.metrics.at("critic/clip_fraction").value(), 0.25);
  const std::vector<double> d = value_list(got.d_values_R);
  EXPECT_NEAR(d[0], 0.1 * -1.8, 1e-12);
  EXPECT_EQ(d[1], 0);
  EXPECT_NEAR(d[2], 0.3, 1e-12);
  EXPECT_NEAR(d[3], 0.4 * -2, 1e-12);
  EXPECT_NEAR(loss_of(value_loss(rows(), {})), 0.5 * (0.1 * 3.24 + 0.2 + 0.3 + 1.6), 1e-12);
}

TEST(ValueLoss, GradientIsTheCentralDifference) {
  for (const std::optional<double> eps_clip : {std::optional<double>(0.5), std::optional<double>()}) {
    const auto analytic = value_list(value_loss(rows(), eps_clip).d_values_R);
    for (int64_t i = 0; i < 4; ++i) {
      const auto at_step = [&](double h) {
        ValueRows moved = rows();
        moved.values_R[i] += h;
        return loss_of(value_loss(moved, eps_clip));
      };
      EXPECT_NEAR((at_step(1e-6) - at_step(-1e-6)) / 2e-6, analytic[static_cast<size_t>(i)], 1e-9) << i;
    }
  }
}

TEST(ValueLoss, IsTheSumOverRowsAndZeroWithoutRows) {
  const ValueRows all = rows();
  double sum = 0;
  for (int64_t i = 0; i < 4; ++i)
    sum += loss_of(value_loss({all.values_R.narrow(0, i, 1), all.old_values_R.narrow(0, i, 1),
                               all.returns_R.narrow(0, i, 1), all.weights_R.narrow(0, i, 1)},
                              0.5));
  EXPECT_NEAR(sum, loss_of(value_loss(all, 0.5)), 1e-12);
  const auto none = column({});
  EXPECT_EQ(loss_of(value_loss({none, none, none, none}, 0.5)), 0);
  ValueRows wild = rows();
  wild.values_R[1] = NAN;
  EXPECT_TRUE(std::isnan(value_list(value_loss(wild, 0.5).d_values_R)[1])) << "the optimizer must see it";
  wild.returns_R = column({1});
  EXPECT_THROW(value_loss(wild, 0.5), InternalError);
}

TEST(ExplainedVariance, IsOneForEqualZeroForConstantAndNegativeForWrongValues) {
  const auto returns = column({1, 2, 4});
  EXPECT_EQ(explained_variance(returns, returns), 1);
  EXPECT_NEAR(explained_variance(column({7, 7, 7}), returns), 0, 1e-12);
  EXPECT_LT(explained_variance(column({4, 2, 1}), returns), 0);
  EXPECT_EQ(explained_variance(returns, column({3, 3, 3})), 0);
  EXPECT_EQ(explained_variance(column({}), column({})), 0);
}

}  // namespace
}  // namespace bough
