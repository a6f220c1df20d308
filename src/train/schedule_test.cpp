#include "train/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "train/optimizer.h"

namespace bough {
namespace {

Schedule schedule(Schedule::Shape shape, double min_ratio = 0) {
  return {.peak = 2, .shape = shape, .min_ratio = min_ratio, .num_warmup_steps = 4, .num_steps = 12};
}

TEST(Schedule, WarmsUpInWholeStepsAndTheFirstMoves) {
  for (const auto shape : {Schedule::Shape::kConstant, Schedule::Shape::kLinear, Schedule::Shape::kCosine}) {
    const auto s = schedule(shape, 0.1);
    EXPECT_DOUBLE_EQ(s.learning_rate(0), 0.5);
    EXPECT_DOUBLE_EQ(s.learning_rate(2), 1.5);
    EXPECT_DOUBLE_EQ(s.learning_rate(3), 2);
    EXPECT_DOUBLE_EQ(s.learning_rate(4), 2);
  }
}

TEST(Schedule, DecaysToTheRatioAndStaysThere) {
  EXPECT_DOUBLE_EQ(schedule(Schedule::Shape::kConstant).learning_rate(1000), 2);
  const auto linear = schedule(Schedule::Shape::kLinear, 0.25);
  EXPECT_DOUBLE_EQ(linear.learning_rate(8), 2 * (0.25 + 0.75 / 2));
  EXPECT_DOUBLE_EQ(linear.learning_rate(12), 0.5);
  EXPECT_DOUBLE_EQ(linear.learning_rate(1000), 0.5);
  const auto cosine = schedule(Schedule::Shape::kCosine, 0.25);
  EXPECT_DOUBLE_EQ(cosine.learning_rate(6), 2 * (0.25 + 0.75 * (1 + std::sqrt(0.5)) / 2));
  EXPECT_DOUBLE_EQ(cosine.learning_rate(8), 2 * (0.25 + 0.75 / 2));
  EXPECT_DOUBLE_EQ(cosine.learning_rate(12), 0.5);
  EXPECT_DOUBLE_EQ(cosine.learning_rate(13), 0.5);
  EXPECT_GT(cosine.learning_rate(11), 0.5);  // the last step of the run still learns at min_ratio 0
}

TEST(Schedule, RunsOfNoOrOnlyWarmUpSteps) {
  const Schedule none{.peak = 1, .shape = Schedule::Shape::kCosine};
  EXPECT_DOUBLE_EQ(none.learning_rate(0), 1);
  const Schedule all{.peak = 1, .shape = Schedule::Shape::kCosine, .num_warmup_steps = 5, .num_steps = 5};
  EXPECT_DOUBLE_EQ(all.learning_rate(4), 1);
}

TEST(Schedule, FromSettings) {
  OptimizerSettings settings;
  settings.lr = 3e-4;
  settings.warmup_steps_proportion = 0.29;
  settings.lr_scheduler_type = "cosine";
  settings.min_lr_ratio = 0.5;
  const auto s = make_schedule(settings, 100);
  EXPECT_EQ(s.num_warmup_steps, 29);  // 0.29 · 100 is 28.999… in binary
  EXPECT_EQ(s.num_steps, 100);
  EXPECT_EQ(s.shape, Schedule::Shape::kCosine);
  EXPECT_EQ(s.peak, 3e-4);
  EXPECT_EQ(s.min_ratio, 0.5);
  EXPECT_THROW(schedule_shape("cosin"), UserError);
}

}  // namespace
}  // namespace bough
