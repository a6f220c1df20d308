#include "control/run_simulator.h"

#include <gtest/gtest.h>

namespace bough {
namespace {

// A cluster on which generation takes about as long as training.
SimulationOptions cluster(int64_t eta) {
  SimulationOptions options;
  options.controller.batch_groups = 32;
  options.controller.group_size = 8;
  options.controller.max_staleness = eta;
  options.controller.total_steps = 12;
  options.rates = {.rollout_devices = 1,
                   .train_devices = 1,
                   .max_running = 256,
                   .pass_seconds = 0.02,
                   .sample_seconds = 4e-5,
                   .prefill_tokens_per_s = 5e4,
                   .train_tokens_per_s = 8e3,
                   .step_seconds = 1};
  options.lengths = {.mean = 600, .sigma = 1.0, .longest = 8192, .seen = {}};
  return options;
}

double best_rate(const std::vector<SplitResult>& splits, bool is_synchronous) {
  double best = 0;
  for (const SplitResult& split : splits)
    if ((split.max_staleness == 0) == is_synchronous) best = std::max(best, split.result.tokens_per_second());
  return best;
}

// AReaL, figures 4 and 6. A synchronous run stops scaling, because the longest sample of a batch takes as
// long on many devices as on few. An asynchronous run scales nearly with its devices.
TEST(RunSimulator, SynchronousRunsFlattenAndAsynchronousOnesScale) {
  const auto few = simulate_splits(cluster(0), 4, {0, 4});
  SimulationOptions larger = cluster(0);
  larger.controller.batch_groups *= 4;
  const auto many = simulate_splits(larger, 16, {0, 4});
  const auto fixed_batch = simulate_splits(cluster(0), 16, {0, 4});
  const double synchronous = best_rate(few, true), asynchronous = best_rate(few, false);
  EXPECT_GT(asynchronous, 1.2 * synchronous);
  EXPECT_LT(best_rate(fixed_batch, true), 2.5 * synchronous) << "of 4 times the devices";
  EXPECT_GT(best_rate(many, false), 3.2 * asynchronous);
  EXPECT_GT(best_rate(fixed_batch, false), 1.5 * best_rate(fixed_batch, true));
}

// If only throughput counts, the end-to-end time of a split is that of its slower side (AReaL-DTA, arXiv
// 2602.00482, section on resource allocation): T = max of the two, each inversely proportional to its
// devices.
TEST(RunSimulator, ABalancedSplitIsTheBest) {
  SimulationOptions options = cluster(16);
  options.controller.total_steps = 40;
  options.rates.step_seconds = 0;
  const auto splits = simulate_splits(options, 12, {16});
  size_t best = 0;
  for (size_t i = 0; i < splits.size(); ++i)
    if (splits[i].result.tokens_per_second() > splits[best].result.tokens_per_second()) best = i;
  EXPECT_GT(best, 0u);
  EXPECT_LT(best + 1, splits.size());
  // With few training devices the trainer is never idle. With many it waits.
  EXPECT_LT(splits.back().result.trainer_idle, 0.1);
  EXPECT_GT(splits.front().result.trainer_idle, 0.4);
  EXPECT_NEAR(splits[splits.size() - 1].result.tokens_per_second() * 2,
              splits[splits.size() - 2].result.tokens_per_second(),
              0.15 * splits[splits.size() - 2].result.tokens_per_second());
}

// AReaL, figure 6: interruption gains 12 to 17% with heavy-tailed lengths.
TEST(RunSimulator, InterruptionGainsWhereLengthsAreHeavyTailed) {
  SimulationOptions options = cluster(4);
  options.lengths.sigma = 1.4;
  options.rates.rollout_devices = 3;
  options.rates.train_devices = 2;
  const double with = RunSimulator(options).run().tokens_per_second();
  options.controller.interruptible = false;
  const double without = RunSimulator(options).run().tokens_per_second();
  EXPECT_GT(with, 1.03 * without);
}

TEST(RunSimulator, TheSameRunTwiceIsTheSame) {
  const SimulationResult first = RunSimulator(cluster(2)).run(), second = RunSimulator(cluster(2)).run();
  EXPECT_EQ(first.seconds, second.seconds);
  EXPECT_EQ(first.trained_lengths, second.trained_lengths);
  EXPECT_LE(first.staleness_mean, 2.5);
}

TEST(RunSimulator, LengthsHaveTheirMean) {
  const LengthDistribution lengths{.mean = 500, .sigma = 1.0, .longest = 1 << 20, .seen = {}};
  const CounterRandom random(3, Purpose::test);
  double total = 0;
  for (uint64_t i = 0; i < 20000; ++i) total += static_cast<double>(lengths.draw(random, i, 0));
  EXPECT_NEAR(total / 20000, 500, 25);
  const LengthDistribution seen{.seen = {3, 5}};
  for (uint64_t i = 0; i < 100; ++i) {
    const int64_t length = seen.draw(random, i, 1);
    EXPECT_TRUE(length == 3 || length == 5);
  }
}

}  // namespace
}  // namespace bough
