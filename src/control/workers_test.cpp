// The controller with its threads: an engine that computes nothing, and a trainer and rewards that take some
// time.
#include "control/workers.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/random.h"
#include "control/fakes.h"

namespace bough {
namespace {

using testing::ByteCodec;
using testing::FakeReward;

// Every sample gets one token per engine step. A request's length is a random function of (seed, id). Each
// token has the version that the engine holds.
class SlowEngine final : public testing::BareEngine {
 public:
  explicit SlowEngine(int64_t longest) : longest_(longest) {}

  void submit(GenerationRequest request) override {
    const auto length =
        1 + static_cast<int64_t>(CounterRandom(request.seed, Purpose::test).below(longest_, request.id, 0));
    GenerationResult result{request.id, request.prompt_ids, 1.0, {}, {}};
    result.samples.resize(static_cast<size_t>(request.sampling.n_samples));
    int64_t left = length;
    for (size_t i = 0; i < request.partial.size(); ++i) {
      result.samples[i] = request.partial[i].sample;
      left = length - static_cast<int64_t>(result.samples[i].token_ids.size());
    }
    num_partial_tokens += length - left;
    EXPECT_GT(left, 0);
    EXPECT_TRUE(running_.emplace(request.id, Running{left, std::move(result)}).second);
  }
  std::vector<GenerationResult> step() override {
    EXPECT_FALSE(is_forbidden.load()) << "the engine computes while it is suspended";
    if (step_time.count() > 0) std::this_thread::sleep_for(step_time);
    if (--steps_before_error == 0 || is_broken.load()) throw IoError("the engine broke");
    std::vector<GenerationResult> finished;
    for (auto it = running_.begin(); it != running_.end();) {
      auto& [left, result] = it->second;
      --left;
      for (GeneratedSample& sample : result.samples) {
        sample.token_ids.push_back(left == 0 ? 258 : '4');
        for (auto* list : {&sample.logprobs, &sample.raw_logprobs, &sample.sampling_logprobs})
          list->push_back(-1);
        sample.versions.push_back(version_);
        sample.finish_reason = FinishReason::kStop;
      }
      if (left > 0) {
        ++it;
        continue;
      }
      finished.push_back(std::move(result));
      it = running_.erase(it);
    }
    return finished;
  }
  std::vector<RunningRequest> running() const override {
    std::vector<RunningRequest> requests;
    for (const auto& [id, running] : running_) {
      RunningRequest& request = requests.emplace_back(RunningRequest{.id = id, .samples = {}});
      if (running.result.samples[0].token_ids.empty()) continue;
      for (const GeneratedSample& sample : running.result.samples) request.samples.push_back({sample, false});
    }
    return requests;
  }
  bool idle() const override { return running_.empty(); }
  bool cancel(uint64_t id) override { return running_.erase(id) > 0; }
  void park() override { parked_ = std::exchange(running_, {}); }
  void unpark() override { running_ = std::exchange(parked_, {}); }
  void update_weights(const WeightUpdate& update) override { version_ = update.version; }
  int32_t version() const override { return version_; }

  std::atomic<bool> is_forbidden = false, is_broken = false;
  int64_t num_partial_tokens = 0;  // tokens that requests brought from an earlier run
  int64_t steps_before_error = -1;
  std::chrono::microseconds step_time{0};

 private:
  struct Running {
    int64_t left;
    GenerationResult result;
  };
  int64_t longest_;
  std::map<uint64_t, Running> running_, parked_;
  int32_t version_ = 0;
};

struct Shape {
  int64_t batch_groups = 2, eta = 1, longest = 5, total = 10;
  bool own_threads = true, interruptible = true;
  int64_t reward_threads = 2, evaluates = 0, saves = 0;
};

// A run with the test's trainer and evaluation.
struct Harness final : StepTrainer, Evaluator {
  explicit Harness(const Shape& wanted, RewardFunction* own_reward = nullptr)
      : shape(wanted),
        engine(wanted.longest),
        workers({.engine = engine,
                 .weights = weights,
                 .codec = codec,
                 .reward = own_reward ? *own_reward : reward,
                 .clock = clock,
                 .tasks = tasks,
                 .trainer = *this,
                 .checkpoints = checkpoints,
                 .evaluator = this},
                {.generation = {.sampling = {.n_samples = 2}, .seed = 3},
                 .own_threads = wanted.own_threads,
                 .reward_threads = wanted.reward_threads}),
        controller(workers, clock,
                   {.batch_groups = shape.batch_groups,
                    .max_staleness = shape.eta,
                    .total_steps = shape.total,
                    .group_size = 2,
                    .interruptible = shape.interruptible,
                    .evaluation_seconds = hangs_at_most},
                   policy, observer) {
    policy.evaluates = [every = shape.evaluates](int64_t step, bool) {
      return every > 0 && step % every == 0;
    };
    policy.saves = [every = shape.saves](int64_t step) { return every > 0 && step % every == 0; };
    checkpoints.on_write = [this](const ControllerState& state) {
      if (state.step >= breaks_after_checkpoint) engine.is_broken = true;
    };
  }

  StepRecord train(const TrainOrder& order) override {
    if (order.step == fails_at_step) throw IoError("the trainer broke");
    StepRecord record{.step = order.step, .metrics = {}, .batch = {}};
    for (const ScoredGroup& scored : order.groups) {
      EXPECT_TRUE(trained.insert(scored.group->id).second) << "group " << scored.group->id << " twice";
      for (Trajectory& sample : scored.rows()) record.batch.push_back(std::move(sample));
    }
    for (const Trajectory& sample : record.batch) {
      std::set<int32_t> versions;
      for (size_t i = 0; i < sample.versions.size(); ++i)
        if (sample.loss_mask[i] != 0) versions.insert(sample.versions[i]);
      EXPECT_LT(*versions.rbegin(), order.step);
      num_mixed += versions.size() > 1;
    }
    if (train_time.count() > 0) std::this_thread::sleep_for(train_time);
    return record;
  }
  std::optional<MetricValues> evaluate(const std::function<bool()>& stop) override {
    engine.is_forbidden = true;
    ++num_evaluations;
    while (hangs && !stop()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    engine.is_forbidden = false;
    if (hangs) return std::nullopt;
    return MetricValues{{"eval/avg_at_k", 0.5}};
  }
  void run(const std::function<bool()>& stop = {}) {
    controller.start();
    drive(controller, workers, {.stop = stop, .on_activity = {}});
  }

  static constexpr double hangs_at_most = 0.05;
  const Shape shape;
  Dataset problems = testing::numbered_problems(5);
  testing::RepeatedProblems tasks{problems};
  SteadyClock clock;
  SlowEngine engine;
  SharedWeights weights{nullptr};
  ByteCodec codec;
  FakeReward reward;
  std::set<uint64_t> trained;
  int64_t num_mixed = 0, num_evaluations = 0, fails_at_step = -1, breaks_after_checkpoint = 1 << 30;
  std::chrono::microseconds train_time{0};
  bool hangs = false;
  testing::FakeCheckpoints checkpoints;
  testing::FakePolicy policy;
  ControllerObserver observer;
  RunWorkers workers;
  Controller controller;
};

// The tests for tsan: every thread, in every configuration.
TEST(Workers, RandomRunsTrainEveryGroupOnceOnAllTheirThreads) {
  const CounterRandom random(11, Purpose::test);
  for (uint64_t schedule = 0; schedule < 300 && !::testing::Test::HasFailure(); ++schedule) {
    const auto draw = [&](uint64_t what, int64_t below) {
      return static_cast<int64_t>(random.below(static_cast<uint64_t>(below), schedule, what));
    };
    const Shape shape{.batch_groups = 1 + draw(0, 4),
                      .eta = draw(1, 4),
                      .longest = 1 + draw(2, 9),
                      .total = 1 + draw(3, 6),
                      .own_threads = draw(4, 4) > 0 && draw(1, 4) > 0,
                      .interruptible = draw(5, 2) == 0,
                      .reward_threads = 1 + draw(6, 3),
                      .evaluates = draw(7, 4),
                      .saves = draw(8, 3)};
    Harness run(shape);
    run.train_time = std::chrono::microseconds(draw(9, 300));
    run.run();
    EXPECT_EQ(run.controller.num_steps(), shape.total);
    EXPECT_EQ(static_cast<int64_t>(run.trained.size()), shape.total * shape.batch_groups);
    EXPECT_EQ(*run.trained.rbegin() + 1, run.trained.size());
    ASSERT_TRUE(run.checkpoints.saved);
    EXPECT_EQ(run.checkpoints.saved->step, shape.total);
    EXPECT_TRUE(run.checkpoints.saved->buffered.empty() && run.checkpoints.saved->awaiting.empty() &&
                run.checkpoints.saved->running.empty());
  }
}

TEST(Workers, RunningSamplesGoOnUnderNewWeightsOnlyWhereTheyMayBeInterrupted) {
  for (const bool interruptible : {true, false}) {
    Harness run({.batch_groups = 2, .eta = 8, .longest = 400, .total = 40, .interruptible = interruptible});
    // The trainer waits for samples, not samples for the trainer.
    run.engine.step_time = std::chrono::microseconds(20);
    run.run();
    EXPECT_EQ(run.num_mixed > 0, interruptible);
  }
}

TEST(Workers, ARunStoppedAnywhereGoesOnWithTheTokensThatItHad) {
  Harness first({.batch_groups = 2, .eta = 4, .longest = 500, .total = 20});
  // The trainer waits for samples, not samples for the trainer.
  first.engine.step_time = std::chrono::microseconds(20);
  first.run([&] { return first.controller.num_steps() >= 5; });
  EXPECT_TRUE(first.controller.is_stopping());
  ASSERT_TRUE(first.checkpoints.saved);
  EXPECT_FALSE(first.checkpoints.saved->running.empty()) << "nothing was running";
  const Dataset& problems = first.problems;
  ProblemOrder order(problems, 1);
  const Json saved = Json::parse(to_json(*first.checkpoints.saved, order).dump());
  Harness second(first.shape);
  second.controller.restore(controller_state_from_json(saved, order));
  second.run();
  EXPECT_GT(second.engine.num_partial_tokens, 0);
  std::set<uint64_t> trained = first.trained;
  for (const uint64_t id : second.trained)
    EXPECT_TRUE(trained.insert(id).second) << "group " << id << " twice";
  EXPECT_EQ(trained.size(), 40u);
  EXPECT_EQ(*trained.rbegin(), 39u);
}

TEST(Workers, AnExceptionOfAnyThreadEndsTheRun) {
  for (const bool own_threads : {true, false}) {
    Harness engine({.eta = own_threads ? 1 : 0, .own_threads = own_threads});
    engine.engine.steps_before_error = 3;
    EXPECT_THROW(engine.run(), IoError);
    Harness trainer({.eta = own_threads ? 1 : 0, .own_threads = own_threads});
    trainer.fails_at_step = 2;
    EXPECT_THROW(trainer.run(), IoError);
    EXPECT_EQ(trainer.controller.num_steps(), 1);
  }
}

TEST(Workers, ARunWhoseEngineBrokeGoesOnFromItsLastCheckpoint) {
  Harness first({.batch_groups = 2, .eta = 2, .longest = 9, .total = 200, .saves = 1});
  first.breaks_after_checkpoint = 5;
  EXPECT_THROW(first.run(), IoError);
  first.workers.join();  // another checkpoint may be in progress
  ASSERT_TRUE(first.checkpoints.saved);
  const int64_t step = first.checkpoints.saved->step;
  ASSERT_GE(step, 5);
  ASSERT_LT(step, 200);
  ProblemOrder order(first.problems, 1);
  const Json saved = Json::parse(to_json(*first.checkpoints.saved, order).dump());
  Harness second(first.shape);
  second.controller.restore(controller_state_from_json(saved, order));
  second.run();
  EXPECT_EQ(second.controller.num_steps(), 200);
  // Groups trained on after the checkpoint are trained on again, from the checkpoint's weights. No other
  // group is.
  EXPECT_EQ(static_cast<int64_t>(second.trained.size()), 400 - 2 * step);
  std::set<uint64_t> trained = first.trained;
  trained.insert(second.trained.begin(), second.trained.end());
  EXPECT_EQ(trained.size(), 400u);
  EXPECT_EQ(*trained.rbegin(), 399u);
}

class BrokenReward final : public RewardFunction {
 public:
  std::vector<RewardResult> score_all(std::span<const RewardRequest>) override {
    throw IoError("the reward broke");
  }
};

TEST(Workers, AnExceptionOfARewardEndsTheRun) {
  BrokenReward broken;
  Harness run({}, &broken);
  EXPECT_THROW(run.run(), IoError);
}

TEST(Workers, AnEvaluationThatHangsIsGivenUpAtItsDeadline) {
  for (const bool own_threads : {true, false}) {
    Harness run({.eta = own_threads ? 2 : 0, .total = 3, .own_threads = own_threads, .evaluates = 3});
    run.hangs = true;
    run.run();
    EXPECT_EQ(run.num_evaluations, 2) << "before the first step, and after the third";
    EXPECT_EQ(run.controller.num_steps(), 3);
  }
}

TEST(Workers, AStopEndsAnEvaluationAtOnce) {
  Harness run({.eta = 2, .total = 3, .evaluates = 1});
  run.hangs = true;
  int polls = 0;
  run.run([&] { return ++polls > 3; });
  EXPECT_TRUE(run.controller.is_stopping());
  ASSERT_TRUE(run.checkpoints.saved);
}

TEST(Workers, TheTimelineSaysWhoDidWhat) {
  Harness run({.total = 5, .evaluates = 5});
  run.train_time = std::chrono::milliseconds(2);
  run.run();
  std::map<std::string, double> seconds;
  for (const TimelineSpan& span : run.workers.timeline().take(/*all=*/true)) {
    EXPECT_LE(span.begin, span.end);
    seconds[span.lane + "/" + span.what] += span.end - span.begin;
  }
  EXPECT_GT(seconds["trainer/train"], 0.006);  // the last span may still be open
  EXPECT_GT(seconds["engine/generate"], 0);
  EXPECT_TRUE(seconds.contains("engine/evaluate") && seconds.contains("rewards/reward"));
}

}  // namespace
}  // namespace bough
