// The controller, event by event. Each test decides when the workers answer.
#include "control/controller.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "control/fakes.h"

namespace bough {
namespace {

// Records the controller's requests. The test decides when to answer them.
class ManualWorkers final : public Workers {
 public:
  void begin(uint64_t id, std::vector<PartialRollout>) override { partial.push_back(id); }
  void take_weights() override { ++weights_wanted; }
  void evaluate(Clock::Time) override { ++evaluations; }
  void cancel_evaluation() override { ++cancels; }
  void save_running() override { ++running_wanted; }
  void score(GroupPointer group) override { scoring.push_back(group->id); }
  void publish(int64_t version) override { published = version; }
  void train(TrainOrder order) override { orders.push_back(std::move(order)); }
  void take_snapshot() override { ++snapshots; }
  void write_checkpoint(ControllerState state, bool) override { checkpoints.push_back(std::move(state)); }
  EngineStatistics engine_statistics() const override { return {}; }
  double engine_idle_seconds() const override { return 0; }
  Clock::Time last_progress() const override { return {}; }
  std::string busy_with() const override { return "the engine with a pass"; }

  std::vector<uint64_t> partial, scoring;
  std::vector<TrainOrder> orders;
  std::vector<ControllerState> checkpoints;
  int64_t published = -1;
  int weights_wanted = 0, evaluations = 0, cancels = 0, running_wanted = 0, snapshots = 0;
};

class ManualRun : public ControllerObserver {
 public:
  explicit ManualRun(ControllerOptions options) : controller(workers, clock, options, policy, *this) {}

  void on_record(int64_t step, const MetricValues& metrics) override { records.emplace_back(step, metrics); }

  void generate(uint64_t id, const std::vector<bool>& fails = {false, false},
                std::optional<FilterVerdict> verdict = {}) {
    auto group = std::make_shared<FinishedGroup>();
    group->id = id;
    group->samples.resize(fails.size());
    controller.on(GroupGenerated{group});
    GroupScored scored{.id = id, .rewards = {}, .verdict = std::move(verdict)};
    for (const bool failed : fails)
      scored.rewards.push_back(failed ? failed_reward({}, "out of order") : RewardResult{.reward = 1});
    controller.on(std::move(scored));
  }
  void train() {
    TrainingDone done;
    done.record.step = workers.orders.back().step;
    done.record.metrics["loss"] = 1;
    controller.on(std::move(done));
  }

  FakeClock clock;
  ManualWorkers workers;
  testing::FakePolicy policy;
  std::vector<std::pair<int64_t, MetricValues>> records;
  Controller controller;
};

TEST(Controller, TheStalenessLimiterUsesTheVersionThatTheEngineHolds) {
  ManualRun run({.batch_groups = 2, .max_staleness = 1, .total_steps = 9});
  run.controller.start();
  EXPECT_EQ(run.workers.published, 0);
  EXPECT_TRUE(run.workers.partial.empty()) << "the engine has no weights yet";
  run.controller.on(WeightsTaken{0, 0});
  EXPECT_EQ(run.workers.partial.size(), 4u);
  run.generate(1);
  EXPECT_TRUE(run.workers.orders.empty());
  run.generate(0);
  ASSERT_EQ(run.workers.orders.size(), 1u);
  EXPECT_EQ(run.workers.orders[0].groups[0].group->id, 0u) << "the oldest first";
  run.train();
  EXPECT_EQ(run.workers.partial.size(), 4u) << "version 1 is trained, but the engine has version 0";
  run.controller.on(WeightsTaken{1, 4});
  EXPECT_EQ(run.workers.partial.size(), 6u);
}

TEST(Controller, WithFixedStalenessABatchIsExactlyAsOldAsTheBoundAndEngineAndTrainerTakeTurns) {
  ManualRun run({.batch_groups = 2, .max_staleness = 2, .fixed_staleness = true, .total_steps = 5});
  std::vector<int64_t> version_of_group, ages;
  run.policy.refuses = [](const FinishedGroup& group) {
    return group.id == 4 ? std::optional<std::string>("all right") : std::nullopt;
  };
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  size_t generated = 0;
  for (int64_t version = 0; version < 5; ++version) {
    while (generated < run.workers.partial.size()) {
      EXPECT_EQ(std::ssize(run.workers.orders), version) << "training began beside the engine";
      version_of_group.push_back(version);
      run.clock.advance(std::chrono::seconds(1));
      run.generate(generated++);
    }
    ASSERT_EQ(std::ssize(run.workers.orders), version + 1);
    for (const ScoredGroup& scored : run.workers.orders.back().groups)
      ages.push_back(version - version_of_group[scored.group->id]);
    run.train();
    EXPECT_EQ(std::ssize(run.workers.orders), version + 1) << "the engine has no new weights yet";
    EXPECT_EQ(generated, run.workers.partial.size());
    if (version < 4) run.controller.on(WeightsTaken{version + 1, 0});
  }
  ASSERT_EQ(run.records.size(), 5u);
  for (const auto& [step, metrics] : run.records)  // also if the batch was there before the step
    EXPECT_EQ(metrics.at("time/rollout"),
              std::count(version_of_group.begin(), version_of_group.end(), step - 1));
  EXPECT_EQ(ages, (std::vector<int64_t>{0, 0, 1, 1, 2, 2, 2, 2, 2, 2}));
  EXPECT_EQ(version_of_group, (std::vector<int64_t>{0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 2}));
}

TEST(Controller, ADroppedGroupGivesItsSlotBackAndSaysWhy) {
  ManualRun run({.batch_groups = 2, .total_steps = 1});
  run.policy.refuses = [](const FinishedGroup& group) {
    return group.id == 1 ? std::optional<std::string>("all right") : std::nullopt;
  };
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  EXPECT_EQ(run.workers.partial, (std::vector<uint64_t>{0, 1}));
  run.generate(0, {true, true, false});
  EXPECT_EQ(run.workers.partial.size(), 2u) << "the other one is not scored yet";
  run.generate(1);
  EXPECT_EQ(run.workers.partial.size(), 4u);
  run.generate(2, {true, false, false});
  run.generate(3);
  ASSERT_EQ(run.workers.orders.size(), 1u);
  const Trajectory failed = run.workers.orders[0].groups[0].row(0);
  EXPECT_FALSE(failed.valid);
  EXPECT_FALSE(failed.reward) << "a failed reward is nobody's zero";
  EXPECT_EQ(run.controller.dropped_by_reason(),
            (std::map<std::string, int64_t>{{"all right", 1}, {"too few rewards", 1}}));
}

TEST(Controller, ASynchronousRunPausesBetweenTwoStepsAndAnAsynchronousOneAtOnce) {
  for (const int64_t eta : {0, 1}) {
    SCOPED_TRACE(eta);
    ManualRun run({.batch_groups = 2, .max_staleness = eta, .total_steps = 9, .stall_seconds = 100});
    run.controller.start();
    run.controller.on(WeightsTaken{0, 0});
    const size_t begun = run.workers.partial.size();
    run.generate(0);
    run.controller.on(PauseRequested{});
    EXPECT_FALSE(run.controller.is_paused()) << "groups are running";
    for (size_t id = 1; id < begun; ++id) run.generate(id);
    if (eta == 0) {
      EXPECT_FALSE(run.controller.is_paused()) << "the step is in work";
      run.train();
      run.controller.on(WeightsTaken{1, 0});
    }
    EXPECT_TRUE(run.controller.is_paused());
    EXPECT_EQ(run.workers.orders.size(), eta == 0 ? 1u : 0u);
    EXPECT_EQ(run.workers.partial.size(), begun) << "no group began";
    run.clock.advance(std::chrono::seconds(5000));
    EXPECT_NO_THROW(run.controller.on(TimePassed{})) << "a pause is no stall";
    run.controller.on(ResumeRequested{});
    EXPECT_FALSE(run.controller.is_paused());
    if (eta == 0) {
      EXPECT_GT(run.workers.partial.size(), begun);
      run.generate(2);
      run.generate(3);
    }
    run.clock.advance(std::chrono::seconds(3));
    run.train();
    EXPECT_LT(run.records.back().second.at("time/step"), 100) << "the pause counts for no step";
    run.controller.check_integrity();
  }
}

TEST(Controller, ARunOfFixedStalenessPausesBetweenTwoSteps) {
  ManualRun run({.batch_groups = 2, .max_staleness = 1, .fixed_staleness = true, .total_steps = 9});
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  run.generate(0);
  run.controller.on(PauseRequested{});
  for (uint64_t id = 1; id < 4; ++id) run.generate(id);
  ASSERT_EQ(run.workers.orders.size(), 1u) << "the step in work is finished";
  EXPECT_FALSE(run.controller.is_paused());
  run.train();
  run.controller.on(WeightsTaken{1, 0});
  EXPECT_TRUE(run.controller.is_paused()) << "with the groups that wait for the next step";
  EXPECT_EQ(run.workers.partial.size(), 4u);
  run.controller.on(ResumeRequested{});
  EXPECT_EQ(run.workers.partial.size(), 6u);
}

TEST(Controller, APausedRunWritesACheckpointAtOnceAndStops) {
  ManualRun run({.batch_groups = 1, .max_staleness = 1, .total_steps = 9});
  run.policy.saves = [](int64_t) { return false; };
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  run.controller.on(PauseRequested{});
  run.generate(0);
  run.generate(1);
  ASSERT_TRUE(run.controller.is_paused());
  run.controller.on(CheckpointRequested{});
  run.controller.on(SnapshotTaken{});
  ASSERT_EQ(run.workers.checkpoints.size(), 1u);
  EXPECT_EQ(run.workers.checkpoints[0].buffered.size(), 2u) << "nothing is lost";
  run.controller.on(CheckpointWritten{});
  EXPECT_TRUE(run.controller.is_paused());
  run.controller.on(StopRequested{});
  EXPECT_TRUE(run.controller.is_finished());
}

TEST(Controller, AnEvaluationOnRequestFollowsTheStepInWork) {
  ManualRun run({.batch_groups = 1, .total_steps = 9});
  run.policy.evaluates = [](int64_t, bool) { return false; };
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  run.controller.on(EvaluationRequested{});
  EXPECT_EQ(run.workers.evaluations, 0);
  run.generate(0);
  run.train();
  run.controller.on(WeightsTaken{1, 0});
  EXPECT_EQ(run.workers.evaluations, 1);
  run.controller.on(EvaluationDone{MetricValues{{"eval/avg_at_k", 0.5}}});
  EXPECT_EQ(run.records.back().second.count("eval/avg_at_k"), 1u);
}

// Two rows of the batch from one conversation, and a failed row: one sample with a reward, not two.
TEST(Controller, MinGroupCountsTrajectoriesNotRows) {
  ManualRun run({.batch_groups = 1, .total_steps = 1});
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  auto group = std::make_shared<FinishedGroup>();
  group->samples.resize(3);
  for (size_t i = 0; i < 3; ++i) group->samples[i].trajectory = i < 2 ? "0" : "1";
  run.controller.on(GroupGenerated{group});
  const RewardResult one{.reward = 1};
  run.controller.on(GroupScored{.id = 0, .rewards = {one, one, failed_reward({}, "broken")}, .verdict = {}});
  EXPECT_TRUE(run.workers.orders.empty());
  EXPECT_EQ(run.controller.dropped_by_reason(), (std::map<std::string, int64_t>{{"too few rewards", 1}}));
}

// A synchronous step starts replacements for refused groups only when all groups started before are scored,
// in whatever order the rewards come.
TEST(Controller, RefusedGroupsAreReplacedInRoundsAndCountedByReason) {
  ManualRun run({.batch_groups = 3, .total_steps = 2, .max_generated_batches = 3});
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  run.generate(2, {false, false}, FilterVerdict{.keeps = false, .error = ""});
  run.generate(0, {false, false}, FilterVerdict{.keeps = false, .error = "it raised"});
  EXPECT_EQ(run.workers.partial.size(), 3u);
  run.generate(1, {false, false}, FilterVerdict{});
  EXPECT_EQ(run.workers.partial, (std::vector<uint64_t>{0, 1, 2, 3, 4}));
  run.generate(4);
  run.generate(3, {false, true}, FilterVerdict{});  // fewer than min_group samples
  run.generate(5);
  ASSERT_EQ(run.workers.orders.size(), 1u);
  std::vector<uint64_t> trained;
  for (const ScoredGroup& scored : run.workers.orders[0].groups) trained.push_back(scored.group->id);
  EXPECT_EQ(trained, (std::vector<uint64_t>{1, 4, 5}));
  run.train();
  ASSERT_EQ(run.records.size(), 1u);
  const MetricValues& metrics = run.records[0].second;
  EXPECT_EQ(metrics.at("rollout/groups_refused"), 3);
  EXPECT_EQ(metrics.at("refused/filter"), 1);
  EXPECT_EQ(metrics.at("refused/filter_failed"), 1);
  EXPECT_EQ(metrics.at("refused/too_few_rewards"), 1);
}

TEST(Controller, AStepGeneratesAtMostMaxGeneratedBatches) {
  const std::set<uint64_t> kept = {2};
  ManualRun run({.batch_groups = 2, .total_steps = 9, .max_generated_batches = 2});
  run.policy.refuses = [&](const FinishedGroup& group) {
    return kept.contains(group.id) ? std::nullopt : std::optional<std::string>("equal rewards");
  };
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  for (const uint64_t id : {0, 1, 2, 3}) run.generate(id);
  ASSERT_EQ(run.workers.orders.size(), 1u) << "two batches were drawn";
  EXPECT_EQ(run.workers.orders[0].groups.size(), 1u);
  EXPECT_EQ(run.workers.partial.size(), 4u);
  run.train();
  run.controller.on(WeightsTaken{1, 0});
  for (const uint64_t id : {4, 5, 6}) run.generate(id);
  try {
    run.generate(7);
    FAIL() << "it went on with nothing to train on";
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("refused all of 4 groups that were generated for step 2"),
              std::string::npos)
        << error.what();
    EXPECT_NE(std::string(error.what()).find("actor.max_num_gen_batches (2"), std::string::npos);
  }
}

TEST(Controller, AFilterThatFailsOneGroupAfterTheOtherEndsTheRun) {
  ManualRun run({.batch_groups = 2, .total_steps = 9, .max_consecutive_failures = 3});
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  const FilterVerdict failed{.keeps = false, .error = "KeyError: 'length'"};
  run.generate(0, {false, false}, failed);
  run.generate(1, {false, false}, FilterVerdict{});
  run.generate(2, {false, false}, failed);
  run.generate(3, {false, false}, failed);
  try {
    run.generate(4, {false, false}, failed);
    FAIL() << "a filter that always fails";
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("KeyError: 'length'"), std::string::npos) << error.what();
  }
}

// The problems are not to blame.
TEST(Controller, AFilterThatAlwaysRaisesIsNamedWithItsFirstError) {
  ManualRun run({.batch_groups = 1, .total_steps = 9, .max_generated_batches = 2});
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  run.generate(0, {false, false}, FilterVerdict{.keeps = false, .error = "KeyError: 'length'"});
  try {
    run.generate(1, {false, false}, FilterVerdict{.keeps = false, .error = "another one"});
    FAIL() << "a filter that always fails";
  } catch (const IoError& error) {
    EXPECT_EQ(std::string(error.what()).find("the filter raised for 2 of the last 2 groups"), 0u);
    EXPECT_NE(std::string(error.what()).find("KeyError: 'length'"), std::string::npos) << error.what();
    EXPECT_EQ(std::string(error.what()).find("too easy"), std::string::npos) << error.what();
  }
}

TEST(Controller, RewardsThatFailOneAfterTheOtherEndTheRunWithTheLastError) {
  ManualRun run({.batch_groups = 8, .total_steps = 9, .max_consecutive_failures = 6});
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  run.generate(0, {true, true, true, true});
  run.generate(1, {true, false});
  run.generate(2, {true, true, true, true});
  try {
    run.generate(3, {true, true});
    FAIL() << "nothing was thrown";
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("6 rewards all failed"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("out of order"), std::string::npos) << error.what();
  }
}

TEST(Controller, AnEvaluationHasItsStepsWeightsAndRecordsKeepTheirOrder) {
  ManualRun run({.batch_groups = 1, .max_staleness = 4, .total_steps = 9});
  run.policy.evaluates = [](int64_t step, bool) { return step == 1; };
  run.policy.saves = [](int64_t step) { return step == 2; };
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  for (uint64_t id = 0; id < 4; ++id) run.generate(id);
  run.train();
  EXPECT_EQ(run.workers.orders.size(), 1u) << "version 2 could replace version 1 before the engine has that";
  EXPECT_EQ(run.workers.evaluations, 0);
  run.controller.on(WeightsTaken{1, 1});
  EXPECT_EQ(run.workers.evaluations, 1);
  ASSERT_EQ(run.workers.orders.size(), 2u) << "training goes on beside the evaluation";
  run.train();
  EXPECT_EQ(run.workers.weights_wanted, 2) << "the swap waits for the evaluation";
  EXPECT_TRUE(run.records.empty());
  EXPECT_EQ(run.workers.snapshots, 1);
  run.controller.on(SnapshotTaken{});
  run.controller.on(RunningSaved{});
  EXPECT_TRUE(run.workers.checkpoints.empty()) << "a checkpoint covers complete records";
  run.controller.on(EvaluationDone{MetricValues{{"eval/avg_at_k", 0.5}}});
  ASSERT_EQ(run.records.size(), 2u);
  EXPECT_EQ(run.records[0].first, 1);
  EXPECT_EQ(run.records[0].second.at("eval/avg_at_k"), 0.5);
  EXPECT_FALSE(run.records[1].second.contains("eval/avg_at_k"));
  EXPECT_EQ(run.workers.checkpoints.size(), 1u);
  EXPECT_EQ(run.workers.weights_wanted, 3);
}

TEST(Controller, RunningSamplesFinishOnTheOldWeightsWhereTheyMayNotBeInterrupted) {
  ManualRun run({.batch_groups = 1, .max_staleness = 2, .total_steps = 9, .interruptible = false});
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  EXPECT_EQ(run.workers.partial.size(), 3u);
  run.generate(0);
  run.train();
  EXPECT_EQ(run.workers.weights_wanted, 1);
  run.generate(1);
  run.generate(2);
  EXPECT_EQ(run.workers.weights_wanted, 2) << "nothing runs any more";
}

TEST(Controller, AStopInAnEvaluationKeepsTheStepsMetricsForTheRunThatGoesOn) {
  const ControllerOptions options{.batch_groups = 1, .total_steps = 9};
  const auto evaluates = [](int64_t step, bool) { return step == 1; };
  ManualRun run(options);
  run.policy.evaluates = evaluates;
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  run.generate(0);
  run.train();
  run.controller.on(WeightsTaken{1, 0});
  EXPECT_EQ(run.workers.evaluations, 1);
  run.controller.on(StopRequested{});
  EXPECT_EQ(run.workers.cancels, 1);
  run.controller.on(EvaluationDone{});
  ASSERT_EQ(run.workers.checkpoints.size(), 1u);
  run.controller.on(CheckpointWritten{});
  EXPECT_TRUE(run.controller.is_finished());
  EXPECT_TRUE(run.records.empty());

  const Dataset problems = testing::numbered_problems(5);
  ProblemOrder order(problems, 1);
  const Json saved = Json::parse(to_json(run.workers.checkpoints[0], order).dump());
  ManualRun second(options);
  second.policy.evaluates = evaluates;
  second.controller.restore(controller_state_from_json(saved, order));
  second.controller.start();
  second.controller.on(WeightsTaken{1, 0});
  EXPECT_EQ(second.workers.evaluations, 1);
  second.controller.on(EvaluationDone{MetricValues{{"eval/avg_at_k", 0.5}}});
  ASSERT_EQ(second.records.size(), 1u);
  EXPECT_EQ(second.records[0].first, 1);
  EXPECT_EQ(second.records[0].second.at("loss"), 1);
  EXPECT_EQ(second.records[0].second.at("eval/avg_at_k"), 0.5);
}

TEST(Controller, ACheckpointHasEverythingThatWasBegun) {
  ManualRun run({.batch_groups = 1, .max_staleness = 4, .total_steps = 9});
  run.policy.saves = [](int64_t step) { return step == 1; };
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  ASSERT_EQ(run.workers.partial.size(), 5u);
  run.generate(0);
  run.generate(1);
  auto unscored = std::make_shared<FinishedGroup>();
  unscored->id = 2;
  unscored->samples.resize(2);
  run.controller.on(GroupGenerated{unscored});
  run.train();  // while 1 is in the buffer, 2 awaits its reward, 3 and 4 run
  auto ends = std::make_shared<FinishedGroup>();
  ends->id = 3;
  ends->samples.resize(2);
  run.controller.on(GroupGenerated{ends});  // before the engine reports what is running
  PartialRollout half{.sample = {.token_ids = {7, 8},
                                 .logprobs = {-1, -0.25},
                                 .raw_logprobs = {-1, -0.5},
                                 .sampling_logprobs = {-1, 0},
                                 .versions = {0, 1}},
                      .has_ended = false};
  run.controller.on(RunningSaved{{{.id = 4, .samples = {half}}, {.id = 5, .samples = {half}}}});
  run.controller.on(SnapshotTaken{});
  ASSERT_EQ(run.workers.checkpoints.size(), 1u);
  const Dataset problems = testing::numbered_problems(5);
  ProblemOrder order(problems, 1);
  const ControllerState state =
      controller_state_from_json(Json::parse(to_json(run.workers.checkpoints[0], order).dump()), order);
  EXPECT_EQ(state.next_position, 5);
  EXPECT_TRUE(state.buffered.contains(1));
  EXPECT_TRUE(state.awaiting.contains(2) && state.awaiting.contains(3));
  ASSERT_EQ(state.running.size(), 1u) << "5 was begun after the step, and is not part of it";
  EXPECT_EQ(state.running.at(4)[0].sample.token_ids, (std::vector<int32_t>{7, 8}));
  EXPECT_EQ(state.running.at(4)[0].sample.logprobs, (std::vector<double>{-1, -0.25}));
  EXPECT_EQ(state.running.at(4)[0].sample.versions, (std::vector<int32_t>{0, 1}));
  EXPECT_TRUE(state.unfinished.empty());

  const Dataset others = testing::numbered_problems(6);
  ProblemOrder other_order(others, 1);
  EXPECT_THROW(controller_state_from_json(to_json(state, order), other_order), UserError);
  EXPECT_THROW(controller_state_from_json(Json{{"step", 1}}, order), UserError);
}

TEST(Controller, ACheckpointThatFailsIsTriedAgainAfterTheNextStepAndTheLastIsAnError) {
  ManualRun run({.batch_groups = 1, .max_staleness = 4, .total_steps = 3});
  run.policy.saves = [](int64_t step) { return step == 1; };
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  for (const size_t step : {1u, 2u}) {
    run.generate(step - 1);
    run.train();
    run.controller.on(RunningSaved{});
    run.controller.on(SnapshotTaken{});
    ASSERT_EQ(run.workers.checkpoints.size(), step);
    run.controller.on(CheckpointWritten{"no space left"});
  }
  run.generate(2);
  run.train();
  EXPECT_EQ(run.workers.checkpoints.size(), 3u);
  EXPECT_THROW(run.controller.on(CheckpointWritten{"no space left"}), IoError);
}

TEST(Controller, ALateCheckpointIsReportedWithItsReasonAndFollowsTheOneBeforeIt) {
  ManualRun run({.batch_groups = 1, .max_staleness = 9, .total_steps = 9});
  run.policy.saves = [](int64_t) { return true; };
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  uint64_t id = 0;
  const auto step_and_log = [&] {
    ::testing::internal::CaptureStderr();
    run.generate(id++);
    run.train();
    return ::testing::internal::GetCapturedStderr();
  };
  const auto copy = [&] {
    run.controller.on(RunningSaved{});
    run.controller.on(SnapshotTaken{});
  };
  EXPECT_EQ(step_and_log(), "");
  copy();
  run.clock.advance(std::chrono::seconds(90));
  const std::string log = step_and_log();
  for (const char* part : {"the checkpoint of step 2 is late",
                           "that of step 1 is still being written after 90 s", "saver.freq_steps"})
    EXPECT_NE(log.find(part), std::string::npos) << log;
  EXPECT_EQ(step_and_log(), "") << "the same checkpoint is late";
  EXPECT_EQ(run.workers.checkpoints.size(), 1u);
  run.controller.on(CheckpointWritten{});
  step_and_log();
  copy();
  ASSERT_EQ(run.workers.checkpoints.size(), 2u);
  EXPECT_EQ(run.workers.checkpoints[1].step, 4);
  run.clock.advance(std::chrono::seconds(180));
  EXPECT_EQ(step_and_log(), "") << "as late as checkpoints are in this run";
  run.controller.on(CheckpointWritten{});
  step_and_log();
  copy();
  run.clock.advance(std::chrono::seconds(181));
  EXPECT_NE(step_and_log().find("the checkpoint of step 7 is late"), std::string::npos);
}

TEST(Controller, ARunInWhichNothingHappensEndsAndSaysWhoWasBusy) {
  ManualRun run({.batch_groups = 1, .total_steps = 9, .stall_seconds = 100});
  run.controller.start();
  run.controller.on(WeightsTaken{0, 0});
  run.clock.advance(std::chrono::seconds(99));
  run.controller.on(TimePassed{});
  run.clock.advance(std::chrono::seconds(2));
  try {
    run.controller.on(TimePassed{});
    FAIL() << "it waits for ever";
  } catch (const StallError& error) {
    EXPECT_NE(std::string(error.what()).find("the engine with a pass"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace bough
