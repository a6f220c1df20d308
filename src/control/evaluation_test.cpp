#include "control/evaluation.h"

#include <gtest/gtest.h>

#include "control/fakes.h"

namespace bough {
namespace {

using testing::FakeEngine;
using testing::FakeReward;

// Expected values are from statsmodels' proportion_confint(method="wilson").
TEST(WilsonInterval, KnownValues) {
  const Interval half = wilson_interval(0.5, 100);
  EXPECT_NEAR(half.low, 0.4038315, 1e-6);
  EXPECT_NEAR(half.high, 0.5961685, 1e-6);
  const Interval none = wilson_interval(0, 10);
  EXPECT_DOUBLE_EQ(none.low, 0);
  EXPECT_NEAR(none.high, 0.2775328, 1e-6);
  const Interval all = wilson_interval(1, 10);
  EXPECT_NEAR(all.low, 0.7224672, 1e-6);
  EXPECT_DOUBLE_EQ(all.high, 1);
}

TEST(Evaluate, AverageAndPassAgreeWithTheSamples) {
  FakeEngine engine, again;
  FakeReward reward;
  const Dataset problems = testing::numbered_problems(50);
  const PromptEncoder encoder = testing::byte_level_encoder();
  EvaluationOptions options;
  options.sampling.n_samples = 3;
  options.seed = 4;
  const auto result = evaluate(engine, problems, encoder, reward, options);
  ASSERT_TRUE(result);

  // The expected counts are computed independently, from the submitted requests.
  double right = 0, passed = 0;
  for (const GenerationRequest& request : engine.submitted) {
    again.submit(request);
    const GenerationResult samples = again.step().at(0);
    int64_t of_problem = 0;
    for (const GeneratedSample& sample : samples.samples)
      of_problem += sample.token_ids[0] != '9' && sample.token_ids[0] % 2 == 0;
    right += static_cast<double>(of_problem);
    passed += of_problem > 0;
  }
  EXPECT_DOUBLE_EQ(result->avg_at_k, right / 150);
  EXPECT_DOUBLE_EQ(result->pass_at_k, passed / 50);
  EXPECT_EQ(result->interval.low, wilson_interval(right / 150, 50).low);
  EXPECT_GT(result->pass_at_k, result->avg_at_k);
  EXPECT_EQ(result->length_mean, 2);
  EXPECT_GT(result->failures, 0);
}

TEST(Evaluate, SamplesDifferFromTrainingAndAreTheSameEachTime) {
  FakeReward reward;
  const Dataset problems = testing::numbered_problems(50);
  EvaluationOptions options;
  FakeEngine first, second;
  const PromptEncoder encoder = testing::byte_level_encoder();
  const auto a = evaluate(first, problems, encoder, reward, options);
  const auto b = evaluate(second, problems, encoder, reward, options);
  EXPECT_EQ(a->avg_at_k, b->avg_at_k);
  EXPECT_EQ(first.submitted[0].seed, second.submitted[0].seed);
  EXPECT_NE(first.submitted[0].seed, options.seed);
}

TEST(Evaluate, Stops) {
  FakeEngine engine;
  FakeReward reward;
  EvaluationOptions options;
  options.collect.stop = [] { return true; };
  EXPECT_FALSE(
      evaluate(engine, testing::numbered_problems(5), testing::byte_level_encoder(), reward, options));
}

}  // namespace
}  // namespace bough
