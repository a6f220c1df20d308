// A run assembled from fakes: no model, and files in a temporary folder.
#include "run/run_loop.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <set>

#include "base/base_test_util.h"
#include "base/error.h"
#include "control/fakes.h"
#include "run/run_checkpoints.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

class RecordingTrainer final : public StepTrainer {
 public:
  StepRecord train(const TrainOrder& order) override {
    StepRecord record{.step = order.step, .metrics = {{"loss/policy", 0.5}}, .batch = {}};
    std::vector<uint64_t>& ids = groups.emplace_back();
    for (const ScoredGroup& scored : order.groups) {
      ids.push_back(scored.group->id);
      for (Trajectory& row : scored.rows()) record.batch.push_back(std::move(row));
    }
    batches.push_back(record.batch);
    ++num_steps;
    if (order.step == fails_at) {
      groups.pop_back();
      throw std::bad_alloc();
    }
    return record;
  }

  std::vector<std::vector<uint64_t>> groups;  // by step
  std::vector<std::vector<Trajectory>> batches;
  std::atomic<int64_t> num_steps = 0;  // read by other threads
  int64_t fails_at = 0;                // the step in which memory is full
};

class RunLoopTest : public ::testing::Test {
 protected:
  RunLoopTest() {
    root_ = fs::temp_directory_path() / str("bough_run_loop_", ::getpid());
    fs::remove_all(root_);
    settings_.fileroot = root_.string();
    settings_.model.path = "model";
    settings_.train_dataset = {.path = "data.jsonl", .batch_size = 2};
    settings_.gconfig.n_samples = 4;
    settings_.saver.freq_minutes = 0;
    settings_.total_train_steps = 8;  // so that epochs are no bound
  }
  ~RunLoopTest() override { fs::remove_all(root_); }

  static fs::path metrics_file(const RunFolder& folder) { return folder.path() / "metrics.jsonl"; }

  fs::path root_;
  RunSettings settings_;
  Dataset problems_ = testing::numbered_problems(7), valid_ = testing::numbered_problems(3), none_;
};

// The loop with everything that it refers to: one process of the run.
struct FakeRun {
  FakeRun(const RunSettings& run_settings, const Dataset& problems, const Dataset& valid, int64_t total_steps,
          std::function<bool()> stop = {})
      : settings(run_settings),
        folder(settings),
        tasks(problems, settings),
        reporting(settings, folder, clock, total_steps, DisplayStyle::kSilent),
        schedule(settings.saver, clock),
        loop(settings,
             {.engine = engine,
              .weights = weights,
              .codec = codec,
              .reward = reward,
              .clock = clock,
              .tasks = tasks,
              .trainer = trainer,
              .checkpoints = checkpoints},
             valid, schedule, folder, reporting,
             {.total_steps = total_steps,
              .num_problems = static_cast<int64_t>(problems.size()),
              .stop = std::move(stop)}) {}

  const RunSettings settings;
  SteadyClock clock;
  RunFolder folder;
  RunTasks tasks;
  RunReporting reporting;
  CheckpointSchedule schedule;
  testing::FakeEngine engine;
  SharedWeights weights{nullptr};
  testing::ByteCodec codec;
  testing::FakeReward reward;
  RecordingTrainer trainer;
  testing::FakeCheckpoints checkpoints;
  RunLoop loop;
};

TEST_F(RunLoopTest, TrainsEvaluatesSavesAndReports) {
  settings_.evaluator.freq_steps = 2;
  settings_.saver.freq_steps = 3;
  FakeRun run(settings_, problems_, valid_, 5);
  std::vector<int64_t> saved_steps;
  run.checkpoints.on_write = [&](const ControllerState& state) { saved_steps.push_back(state.step); };
  EXPECT_TRUE(run.loop.run());
  EXPECT_EQ(run.loop.num_steps(), 5);
  EXPECT_EQ(saved_steps, (std::vector<int64_t>{3, 5}));
  ASSERT_EQ(run.trainer.groups.size(), 5u);
  for (const auto& ids : run.trainer.groups) EXPECT_EQ(ids.size(), 2u);
  for (const Trajectory& row : run.trainer.batches[0])
    EXPECT_TRUE(row.reward || row.reward_failure) << "rows come with their rewards";

  std::vector<int64_t> evaluated;
  for (const MetricRecord& record : read_metrics(metrics_file(run.folder))) {
    if (record.values.contains("eval/avg_at_k")) evaluated.push_back(record.step);
    EXPECT_EQ(record.values.contains("loss/policy"), record.step > 0);
  }
  EXPECT_EQ(evaluated, (std::vector<int64_t>{0, 2, 4, 5})) << "before, every 2 steps, and at the end";
  EXPECT_EQ(run.folder.steps_with_rollouts(), (std::vector<int64_t>{1, 2, 3, 4, 5}));
  std::set<std::string> lanes;
  for (const TimelineSpan& span : read_timeline(run.folder.path() / "timeline.jsonl"))
    lanes.insert(span.lane + "/" + span.what);
  for (const char* lane :
       {"engine/generate", "engine/evaluate", "rewards/reward", "trainer/train", "writer/checkpoint"})
    EXPECT_TRUE(lanes.contains(lane)) << lane;

  const RunSummary summary = summarise(run.settings, run.folder, run.loop.num_steps());
  EXPECT_EQ(summary.steps, 5);
  ASSERT_TRUE(summary.before && summary.after);
  EXPECT_EQ(summary.before->step, 0);
  EXPECT_EQ(summary.after->step, 5);
  EXPECT_TRUE(fs::exists(summary.report));
}

TEST_F(RunLoopTest, WithoutValidationProblemsNothingIsEvaluated) {
  settings_.evaluator.freq_steps = 1;
  FakeRun run(settings_, problems_, none_, 2);
  EXPECT_TRUE(run.loop.run());
  const auto records = read_metrics(metrics_file(run.folder));
  ASSERT_EQ(records.size(), 2u);
  for (const MetricRecord& record : records) EXPECT_FALSE(record.values.contains("eval/avg_at_k"));
}

TEST_F(RunLoopTest, AStoppedRunContinuesWithTheNextGroups) {
  for (const int64_t eta : {0, 2}) {
    SCOPED_TRACE(str("eta ", eta));
    settings_.trial_name = str("eta", eta);
    settings_.rollout.max_head_offpolicyness = eta;
    std::vector<std::vector<uint64_t>> groups;
    Json saved;
    {
      RecordingTrainer* trainer = nullptr;
      FakeRun run(settings_, problems_, valid_, 6, [&] { return trainer && trainer->num_steps >= 2; });
      trainer = &run.trainer;
      EXPECT_FALSE(run.loop.run()) << "it was not stopped";
      ASSERT_TRUE(run.checkpoints.saved);
      EXPECT_EQ(run.checkpoints.saved->step, run.loop.num_steps());
      EXPECT_LT(run.loop.num_steps(), 6);
      saved = Json::parse(run.tasks.save(*run.checkpoints.saved).dump());
      groups = run.trainer.groups;
    }
    FakeRun run(settings_, problems_, valid_, 6);
    run.loop.restore(run.tasks.restore(saved));
    EXPECT_TRUE(run.loop.run());
    EXPECT_EQ(run.loop.num_steps(), 6);
    groups.insert(groups.end(), run.trainer.groups.begin(), run.trainer.groups.end());
    std::set<uint64_t> trained;
    for (const auto& ids : groups)
      for (const uint64_t id : ids) EXPECT_TRUE(trained.insert(id).second) << "group " << id << " twice";
    EXPECT_EQ(trained.size(), 12u);
    EXPECT_EQ(*trained.rbegin(), 11u) << "a group was skipped";
  }
}

TEST_F(RunLoopTest, AnErrorLeavesACheckpointOfTheLastCompleteStep) {
  settings_.saver.freq_steps = 10;
  for (const int64_t eta : {0, 2}) {
    SCOPED_TRACE(str("eta ", eta));
    settings_.trial_name = str("error", eta);
    settings_.rollout.max_head_offpolicyness = eta;
    std::vector<std::vector<uint64_t>> groups;
    Json saved;
    {
      FakeRun run(settings_, problems_, none_, 6);
      run.trainer.fails_at = 3;
      EXPECT_THROW(run.loop.run(), std::bad_alloc);
      EXPECT_FALSE(run.checkpoints.saved);
      run.loop.save_last_step();
      ASSERT_TRUE(run.checkpoints.saved);
      EXPECT_EQ(run.checkpoints.saved->step, 2);
      EXPECT_EQ(read_metrics(metrics_file(run.folder)).back().step, 2)
          << "the metrics of its steps come first";
      saved = Json::parse(run.tasks.save(*run.checkpoints.saved).dump());
      groups = run.trainer.groups;
    }
    FakeRun resumed(settings_, problems_, none_, 6);
    resumed.loop.restore(resumed.tasks.restore(saved));
    EXPECT_TRUE(resumed.loop.run());
    groups.insert(groups.end(), resumed.trainer.groups.begin(), resumed.trainer.groups.end());
    std::set<uint64_t> trained;
    for (const auto& ids : groups) trained.insert(ids.begin(), ids.end());
    EXPECT_EQ(groups.size(), 6u);
    EXPECT_EQ(trained.size(), 12u) << "a group was trained twice";
    EXPECT_EQ(*trained.rbegin(), 11u) << "a group was skipped";
  }
}

TEST_F(RunLoopTest, ACheckpointThatCannotBeWrittenAfterAnErrorLeavesTheOthersAlone) {
  settings_.saver.freq_steps = 2;
  for (const bool changed : {true, false}) {
    settings_.trial_name = str("changed", changed);
    FakeRun run(settings_, problems_, none_, 6);
    run.trainer.fails_at = 4;
    EXPECT_THROW(run.loop.run(), std::bad_alloc);
    ASSERT_EQ(run.checkpoints.saved->step, 2);
    if (changed) run.checkpoints.why_not = "the weights had begun to change";
    else run.checkpoints.on_write = [](const ControllerState&) { throw std::bad_alloc(); };
    run.loop.save_last_step();
    EXPECT_EQ(run.checkpoints.saved->step, changed ? 2 : 3) << "3: it was tried";
  }
}

TEST_F(RunLoopTest, DynamicSamplingTrainsOnNoGroupOfEqualRewards) {
  settings_.gconfig.n_samples = 2;
  for (const bool filters : {false, true}) {
    settings_.trial_name = filters ? "with" : "without";
    settings_.actor.filters.dynamic_sampling = filters;
    FakeRun run(settings_, problems_, none_, 8);
    EXPECT_TRUE(run.loop.run());
    int64_t num_equal = 0;
    for (const auto& batch : run.trainer.batches)
      for (size_t i = 0; i < batch.size(); i += 2) num_equal += batch[i].reward == batch[i + 1].reward;
    EXPECT_EQ(num_equal == 0, filters);
  }
}

TEST_F(RunLoopTest, AnExceptionOfTheTrainerEndsTheRun) {
  class BrokenTrainer final : public StepTrainer {
    StepRecord train(const TrainOrder&) override { throw IoError("the trainer broke"); }
  };
  FakeRun run(settings_, problems_, none_, 2);
  BrokenTrainer broken;
  WorkerParts parts{.engine = run.engine,
                    .weights = run.weights,
                    .codec = run.codec,
                    .reward = run.reward,
                    .clock = run.clock,
                    .tasks = run.tasks,
                    .trainer = broken,
                    .checkpoints = run.checkpoints};
  RunLoop loop(run.settings, parts, none_, run.schedule, run.folder, run.reporting,
               {.total_steps = 2, .num_problems = 7, .threads = {}, .stop = {}});
  EXPECT_THROW(loop.run(), IoError);
}

TEST(RunLoop, OptionsFollowTheSettings) {
  RunSettings settings;
  settings.gconfig.n_samples = 8;
  settings.rollout.max_concurrent_rollouts = 10;
  settings.total_train_epochs = 3;
  settings.reward = {{.workers = 2}, {.workers = 9}};
  const RunLoopOptions options{
      .total_steps = 5, .num_problems = 100, .num_engines = 4, .threads = {}, .stop = {}};
  EXPECT_EQ(controller_options(settings, options).total_groups, 300);
  EXPECT_EQ(controller_options(settings, options).samples_in_flight, 80);
  EXPECT_EQ(controller_options(settings, options).group_size, 8);
  EXPECT_FALSE(worker_options(settings, {}).own_threads);
  EXPECT_TRUE(worker_options(settings, {}).generation.in_rounds);
  EXPECT_EQ(worker_options(settings, {}).reward_threads, 9);
  settings.total_train_steps = 5;
  settings.actor.advantages.adv_estimator = "remax";
  settings.rollout.max_head_offpolicyness = 1;
  EXPECT_EQ(controller_options(settings, options).total_groups, 0);
  EXPECT_EQ(controller_options(settings, options).group_size, 9) << "with the baseline response";
  EXPECT_TRUE(worker_options(settings, {}).own_threads);
  EXPECT_FALSE(worker_options(settings, {}).generation.in_rounds);
  EXPECT_TRUE(worker_options(settings, {}).generation.with_baseline);
}

TEST(CheckpointSchedule, ChecksStepsAndTheTimeSinceTheLastCheckpoint) {
  FakeClock clock;
  CheckpointSchedule by_steps({.freq_steps = 3, .freq_minutes = 0}, clock);
  EXPECT_FALSE(by_steps.is_due(2));
  EXPECT_TRUE(by_steps.is_due(3));
  CheckpointSchedule by_time({.freq_steps = 0, .freq_minutes = 10}, clock);
  clock.advance(std::chrono::minutes(9));
  EXPECT_FALSE(by_time.is_due(3));
  clock.advance(std::chrono::minutes(1));
  EXPECT_TRUE(by_time.is_due(1));
  by_time.has_written();
  EXPECT_FALSE(by_time.is_due(2));
}

}  // namespace
}  // namespace bough
