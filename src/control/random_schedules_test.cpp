// The controller under a simulated clock, with random schedules of all events, stops and resumptions
// included. The tests check its guarantees on staleness, counts, order and the distribution of lengths.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/log.h"
#include "control/controller.h"
#include "control/fakes.h"
#include "control/run_simulator.h"

namespace bough {
namespace {

SimulationOptions small_run() {
  SimulationOptions options;
  options.controller.batch_groups = 4;
  options.controller.max_staleness = 2;
  options.controller.total_steps = 12;
  options.controller.group_size = 4;
  options.controller.stall_seconds = 1e6;
  options.rates.max_running = 32;
  options.lengths = {.mean = 60, .sigma = 0.8, .longest = 4000, .seen = {}};
  return options;
}

// Draws random options of a run.
SimulationOptions random_run(const CounterRandom& random, uint64_t schedule) {
  uint64_t what = 0;
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random.below(static_cast<uint64_t>(n), schedule, what++));
  };
  const auto seconds = [&](double most) {
    return below(3) == 0 ? 0 : most * static_cast<double>(below(1000)) / 1000;
  };
  SimulationOptions options = small_run();
  ControllerOptions& run = options.controller;
  run.batch_groups = 1 + below(5);
  run.max_staleness = below(5);
  run.fixed_staleness = below(4) == 0;
  run.total_steps = 1 + below(9);
  run.total_groups = below(3) == 0 ? 1 + below(run.batch_groups * run.total_steps + 2) : 0;
  run.max_buffered_groups = !run.fixed_staleness && below(4) == 0 ? run.batch_groups + below(4) : 0;
  run.group_size = 1 + below(4);
  run.samples_in_flight = below(2) == 0 ? run.group_size + below(20) : std::numeric_limits<int64_t>::max();
  run.weight_sync_steps = run.fixed_staleness ? 1 : 1 + below(run.max_staleness + 1);
  run.interruptible = below(2) == 0;
  run.min_group = 1 + below(3);
  const int64_t evaluates = below(4), saves = below(4);
  auto policy = std::make_shared<testing::FakePolicy>();
  policy->evaluates = [evaluates](int64_t step, bool is_last) {
    return evaluates > 0 && (is_last || step % evaluates == 0);
  };
  policy->saves = [saves](int64_t step) { return saves > 0 && step % saves == 0; };
  run.evaluation_seconds = below(3) == 0 ? 0.5 : 1e6;
  if (below(3) == 0)
    policy->refuses = [](const FinishedGroup& group) {
      return group.id % 5 == 0 ? std::optional<std::string>("a fifth") : std::nullopt;
    };
  options.policy = policy;
  options.reward_failure_rate = below(3) == 0 ? 0.4 : 0;
  options.group_failure_rate = below(4) == 0 ? 0.3 : 0;
  options.rates = {.rollout_devices = 1 + below(3),
                   .train_devices = 1,
                   .max_running = 1 + below(40),
                   .train_tokens_per_s = 100.0 * static_cast<double>(1 + below(100)),
                   .step_seconds = seconds(3),
                   .publish_seconds = seconds(1),
                   .swap_seconds = seconds(0.2),
                   .reward_min_seconds = 0,
                   .reward_max_seconds = seconds(5),
                   .reward_workers = 1 + below(4),
                   .evaluation_seconds = seconds(4),
                   .checkpoint_seconds = seconds(6),
                   .snapshot_seconds = seconds(0.5)};
  options.seed = 17 + schedule;
  return options;
}

// Checks the invariant after every event, from outside the controller: the number of groups that were begun
// and are neither trained on nor dropped never exceeds the staleness limit.
void watch(RunSimulator& run, const SimulationOptions& options, int64_t steps_before) {
  run.on_event = [&run, &options, steps_before] {
    run.controller().check_integrity();
    const Controller::Counts counts = run.controller().counts();
    const int64_t live = counts.buffered + counts.awaiting + counts.running;
    const int64_t begun_steps = steps_before + static_cast<int64_t>(run.trained_groups().size());
    const int64_t slots =
        std::min(counts.version + options.controller.max_staleness + 1, options.controller.total_steps);
    if (counts.version >= 0) {
      EXPECT_LE(begun_steps * options.controller.batch_groups + live,
                slots * options.controller.batch_groups);
    }
    if (options.controller.max_buffered_groups > 0) {
      EXPECT_LE(live, std::max(options.controller.max_buffered_groups, counts.running));
    }
  };
}

TEST(RandomSchedules, NeverStandStillAndTrainEveryGroupOnce) {
  set_log_level(LogLevel::kSilent);
  const CounterRandom random(11, Purpose::test);
  int64_t num_stopped = 0, num_short = 0, num_dropped = 0;
  for (uint64_t schedule = 0; schedule < 1000 && !::testing::Test::HasFailure(); ++schedule) {
    const SimulationOptions options = random_run(random, schedule);
    const ControllerOptions& shape = options.controller;
    SCOPED_TRACE(str("schedule ", schedule, ": batches of ", shape.batch_groups, ", eta ",
                     shape.max_staleness, ", ", shape.total_steps, " steps, ", shape.total_groups,
                     " groups, buffer ", shape.max_buffered_groups, ", published every ",
                     shape.weight_sync_steps, ", interruptible ", shape.interruptible));
    std::set<uint64_t> trained;
    std::vector<std::vector<uint64_t>> batches;
    std::optional<ControllerState> state;
    int64_t steps = 0, dropped = 0;
    // The run stops at random moments and resumes from the checkpoint, as another process would.
    for (uint64_t part = 0;; ++part) {
      RunSimulator run(options);
      if (state) run.restore(*state);
      watch(run, options, steps);
      const bool stops = part < 3 && random.below(2, schedule, 900 + part) == 0;
      const double stop_at = static_cast<double>(random.below(20000, schedule, 950 + part)) / 1000;
      ASSERT_NO_THROW(run.run(stops ? std::optional<double>(stop_at) : std::nullopt));
      for (const auto& batch : run.trained_groups()) batches.push_back(batch);
      for (const auto& [reason, count] : run.controller().dropped_by_reason()) dropped += count;
      steps = run.controller().num_steps();
      ASSERT_TRUE(run.checkpoint() || state) << "nothing was saved";
      if (run.checkpoint()) state = run.checkpoint();
      ASSERT_EQ(state->step, steps) << "what was trained is not covered by the checkpoint";
      const Controller::Counts counts = run.controller().counts();
      if (!run.controller().is_stopping() ||
          (counts.running == 0 && steps >= options.controller.total_steps)) {
        EXPECT_EQ(counts.running + counts.awaiting + counts.buffered + counts.training, 0)
            << "drawn, and no step could use it";
        break;
      }
      ++num_stopped;
    }
    for (const auto& batch : batches) {
      EXPECT_LE(static_cast<int64_t>(batch.size()), options.controller.batch_groups);
      EXPECT_TRUE(std::is_sorted(batch.begin(), batch.end())) << "not the oldest first";
      for (const uint64_t id : batch) EXPECT_TRUE(trained.insert(id).second) << "group " << id << " twice";
    }
    for (size_t i = 0; i + 1 < batches.size(); ++i)
      EXPECT_EQ(static_cast<int64_t>(batches[i].size()), options.controller.batch_groups);
    num_short += static_cast<int64_t>(batches.size()) > 0 &&
                 static_cast<int64_t>(batches.back().size()) < options.controller.batch_groups;
    num_dropped += dropped;
    // Every begun group was trained on or dropped. The resumed run begins the groups again that were begun
    // after the last checkpoint. No position in the order of problems was skipped.
    const auto partial = static_cast<int64_t>(state->next_position);
    const auto num_trained = static_cast<int64_t>(trained.size());
    EXPECT_LT(num_trained == 0 ? -1 : static_cast<int64_t>(*trained.rbegin()), partial);
    EXPECT_GE(num_trained + dropped, partial);
    // If all remaining groups are dropped, the run ends without a step to save. A restarted run drops them
    // once more.
    for (const int64_t id : state->unfinished)
      EXPECT_FALSE(trained.contains(static_cast<uint64_t>(id)))
          << "group " << id << " would be trained twice";
    EXPECT_TRUE(state->unfinished.empty() || dropped > 0);
    if (options.controller.total_groups > 0) {
      EXPECT_LE(partial, options.controller.total_groups);
    }
    if (steps < options.controller.total_steps) {
      EXPECT_GE(num_trained + dropped, options.controller.total_groups);
    } else if (batches.size() > 1 && options.controller.total_groups == 0) {
      EXPECT_EQ(static_cast<int64_t>(trained.size()),
                options.controller.total_steps * options.controller.batch_groups);
    }
  }
  EXPECT_GT(num_stopped, 300);
  EXPECT_GT(num_short, 20);
  EXPECT_GT(num_dropped, 300);
  set_log_level(LogLevel::kInfo);
}

// Returns Kolmogorov's distance of two lists of numbers. The distance of n and m numbers from one
// distribution exceeds 1.95 sqrt((n + m) / (n m)) with a probability of 0.1%.
double ks_distance(std::vector<int64_t> a, std::vector<int64_t> b) {
  std::sort(a.begin(), a.end());
  std::sort(b.begin(), b.end());
  double largest = 0;
  for (const int64_t value : a) {
    const auto share = [value](const std::vector<int64_t>& list) {
      return static_cast<double>(std::upper_bound(list.begin(), list.end(), value) - list.begin()) /
             static_cast<double>(list.size());
    };
    largest = std::max(largest, std::abs(share(a) - share(b)));
  }
  return largest;
}

TEST(RandomSchedules, TrainedLengthsAreSampledLengths) {
  for (const int64_t eta : {1, 4}) {
    SimulationOptions options = small_run();
    options.controller.max_staleness = eta;
    options.controller.total_steps = 120;
    options.lengths = {.mean = 300, .sigma = 1.2, .longest = 20000, .seen = {}};  // long samples take long
    options.rates.max_running = 24;
    RunSimulator run(options);
    const SimulationResult result = run.run();
    std::vector<int64_t> sampled;
    const CounterRandom random(options.seed, Purpose::test);
    for (int64_t id = 0; id < run.num_begun(); ++id)
      for (int64_t i = 0; i < options.controller.group_size; ++i)
        sampled.push_back(options.lengths.draw(random, static_cast<uint64_t>(id), i));
    // If the run goes to its end, every group is trained on: trained and sampled lengths are exactly equal.
    std::vector<int64_t> trained = result.trained_lengths;
    ASSERT_EQ(trained.size(), sampled.size());
    std::sort(trained.begin(), trained.end());
    std::sort(sampled.begin(), sampled.end());
    EXPECT_EQ(trained, sampled) << "eta " << eta;
    // Samples of the run's first half are as long as those of its second half: no sample waits for ever.
    const auto middle =
        result.trained_lengths.begin() + static_cast<int64_t>(result.trained_lengths.size() / 2);
    const std::vector<int64_t> first(result.trained_lengths.begin(), middle),
        second(middle, result.trained_lengths.end());
    const auto n = static_cast<double>(first.size()), m = static_cast<double>(second.size());
    EXPECT_LT(ks_distance(first, second), 1.95 * std::sqrt((n + m) / (n * m))) << "eta " << eta;
    // The check can fail: the shorter half alone has another distribution.
    const std::vector<int64_t> shorter(sampled.begin(),
                                       sampled.begin() + static_cast<int64_t>(sampled.size() / 2));
    EXPECT_GT(ks_distance(shorter, sampled), 0.4);
  }
}

TEST(RandomSchedules, AnEvaluationThatTakesTooLongIsGivenUpAndTrainingGoesOnBesideIt) {
  SimulationOptions options = small_run();
  options.rates.evaluation_seconds = 1000;
  options.controller.evaluation_seconds = 30;
  auto policy = std::make_shared<testing::FakePolicy>();
  policy->evaluates = [](int64_t step, bool is_last) { return step == 3 || is_last; };
  options.policy = policy;
  RunSimulator run(options);
  const SimulationResult result = run.run();
  EXPECT_EQ(result.steps, options.controller.total_steps);
  EXPECT_LT(result.seconds, 200) << "the run waited for the evaluation";
}

}  // namespace
}  // namespace bough
