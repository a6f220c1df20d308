#include "control/sampling.h"

#include <gtest/gtest.h>

#include "control/control_test_util.h"

namespace bough {
namespace {

using testing::FakeEngine;

std::vector<GenerationRequest> requests(int64_t n, int64_t n_samples) {
  GenerationSettings settings;
  settings.n_samples = n_samples;
  std::vector<GenerationRequest> out;
  for (int64_t i = 0; i < n; ++i) out.push_back(make_request(settings, static_cast<uint64_t>(i), {1, 2}, 3));
  return out;
}

TEST(SampleAll, ResultsStandInTheOrderOfTheRequests) {
  FakeEngine engine;
  const auto results = sample_all(engine, requests(9, 2), {});
  ASSERT_TRUE(results);
  ASSERT_EQ(results->size(), 9u);
  for (uint64_t i = 0; i < 9; ++i) EXPECT_EQ((*results)[i].id, i);
}

TEST(SampleAll, KeepsABoundedNumberInFlight) {
  FakeEngine engine;
  SamplingOptions options;
  options.samples_in_flight = 10;
  std::vector<int64_t> progress;
  options.on_progress = [&](int64_t done, int64_t total) {
    EXPECT_EQ(total, 20);
    progress.push_back(done);
  };
  ASSERT_TRUE(sample_all(engine, requests(20, 4), options));
  EXPECT_EQ(engine.most_samples_in_flight, 12);  // a request goes in while fewer than 10 are in flight
  ASSERT_EQ(progress.size(), 20u);
  for (int64_t i = 0; i < 20; ++i) EXPECT_EQ(progress[static_cast<size_t>(i)], i + 1);
}

TEST(SampleAll, AStopLeavesTheEngineIdle) {
  FakeEngine engine;
  SamplingOptions options;
  int polls = 0;
  options.stop = [&] { return ++polls == 3; };
  EXPECT_FALSE(sample_all(engine, requests(9, 2), options));
  EXPECT_TRUE(engine.idle());
}

TEST(SampleAll, AnErrorOfTheEngineLeavesItIdle) {
  FakeEngine engine;
  engine.steps_before_error = 3;
  EXPECT_THROW(sample_all(engine, requests(9, 2), {}), IoError);
  EXPECT_TRUE(engine.idle());
}

}  // namespace
}  // namespace bough
