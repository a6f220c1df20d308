#include "control/rollout_worker.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/random.h"
#include "control/fakes.h"

namespace bough {
namespace {

using testing::ByteCodec;
using testing::FakeReward;

// A token a step for every sample; a request has as many as its (seed, id) draws. Each token carries the
// version that the engine holds.
class SlowEngine final : public Engine {
 public:
  explicit SlowEngine(int64_t longest) : longest_(longest) {}

  void submit(GenerationRequest request) override {
    const auto length =
        1 + static_cast<int64_t>(CounterRandom(request.seed, Purpose::test).below(longest_, request.id, 0));
    GenerationResult result{request.id, request.prompt_ids, 1.0, {}, {}};
    result.samples.resize(static_cast<size_t>(request.sampling.n_samples));
    EXPECT_TRUE(running_.emplace(request.id, Running{length, std::move(result)}).second);
  }
  std::vector<GenerationResult> step() override {
    EXPECT_FALSE(is_forbidden.load()) << "the engine computes while it is suspended";
    if (--steps_before_error == 0) throw IoError("the engine broke");
    std::vector<GenerationResult> finished;
    for (auto it = running_.begin(); it != running_.end();) {
      auto& [left, result] = it->second;
      --left;
      for (GeneratedSample& sample : result.samples) {
        sample.token_ids.push_back(left == 0 ? 258 : '4');
        for (auto* list : {&sample.logprobs, &sample.raw_logprobs, &sample.truncated_logprobs})
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
  bool idle() const override { return running_.empty(); }
  bool cancel(uint64_t id) override { return running_.erase(id) > 0; }
  void pause() override {}
  void resume() override {}
  bool paused() const override { return false; }
  void park() override { parked_ = std::exchange(running_, {}); }
  void unpark() override { running_ = std::exchange(parked_, {}); }
  void update_weights(const WeightUpdate& update) override { version_ = update.version; }
  int32_t version() const override { return version_; }
  EngineStatistics statistics() const override { return {}; }

  std::atomic<bool> is_forbidden = false;
  int64_t steps_before_error = -1;

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
  bool own_thread = true, interruptible = true;
  int64_t reward_threads = 2;
};

// The worker with everything that it needs; its trainer is the test.
struct Harness {
  explicit Harness(const Shape& wanted)
      : shape(wanted),
        engine(wanted.longest),
        gate(wanted.batch_groups, wanted.eta, wanted.total),
        worker({engine, weights, codec, reward, gate, buffer, clock}, [this] { return next_task(); },
               {.generation = {.sampling = {.n_samples = 2}, .seed = 3},
                .own_thread = wanted.own_thread,
                .interruptible = wanted.interruptible,
                .reward_threads = wanted.reward_threads}) {}

  std::optional<GroupTask> next_task() {
    const int64_t id = next_id++;
    const Problem& problem = problems[static_cast<size_t>(id) % problems.size()];
    return GroupTask{.id = static_cast<uint64_t>(id), .name = problem.id, .problem = &problem};
  }
  void publish(int64_t version) {
    weights.publish(static_cast<int32_t>(version));
    worker.weights_published();
  }
  std::vector<FinishedGroup> step() {
    EXPECT_TRUE(worker.wait_for(shape.batch_groups, {}, {}).enough);
    std::vector<FinishedGroup> batch = buffer.take(shape.batch_groups).value();
    publish(++version);
    return batch;
  }

  const Shape shape;
  Dataset problems = testing::numbered_problems(5);
  SteadyClock clock;
  SlowEngine engine;
  SharedWeights weights{nullptr};
  ByteCodec codec;
  FakeReward reward;
  StalenessGate gate;
  ReplayBuffer buffer;
  std::atomic<int64_t> next_id = 0;
  int64_t version = 0;
  RolloutWorker worker;
};

TEST(RolloutWorker, RandomSchedulesTrainEveryGroupOnceAndKeepTheGate) {
  const CounterRandom random(11, Purpose::test);
  for (uint64_t schedule = 0; schedule < 1000; ++schedule) {
    const auto draw = [&](uint64_t what, int64_t below) {
      return static_cast<int64_t>(random.below(static_cast<uint64_t>(below), schedule, what));
    };
    const Shape shape{.batch_groups = 1 + draw(0, 4),
                      .eta = draw(1, 4),
                      .longest = 1 + draw(2, 9),
                      .total = 1 + draw(3, 6),
                      .own_thread = draw(4, 4) > 0,
                      .interruptible = draw(5, 2) == 0,
                      .reward_threads = 1 + draw(6, 3)};
    Harness run(shape);
    run.publish(0);
    std::set<uint64_t> trained;
    for (int64_t step = 0; step < shape.total; ++step) {
      if (draw(10 + static_cast<uint64_t>(step), 3) == 0)
        run.worker.while_suspended([&] {
          run.engine.is_forbidden = true;
          std::this_thread::yield();
          run.engine.is_forbidden = false;
        });
      const StalenessGate::Counts counts = run.gate.counts();
      ASSERT_LE(counts.accepted + counts.running,
                std::min(step + shape.eta + 1, shape.total) * shape.batch_groups);
      for (const FinishedGroup& group : run.step()) {
        EXPECT_TRUE(trained.insert(group.id).second) << "group " << group.id << " is trained on twice";
        for (const Trajectory& sample : group.samples) {
          EXPECT_TRUE(sample.reward);
          for (size_t i = 0; i < sample.versions.size(); ++i)
            EXPECT_TRUE(sample.loss_mask[i] == 0 || sample.versions[i] <= step);
        }
      }
    }
    // Nothing was drawn that no step could use, nothing is left, and the counts say so.
    EXPECT_EQ(static_cast<int64_t>(trained.size()), shape.total * shape.batch_groups);
    EXPECT_EQ(*trained.rbegin() + 1, trained.size());
    EXPECT_EQ(run.buffer.size(), 0);
    EXPECT_EQ(run.gate.counts().running, 0);
    EXPECT_EQ(run.worker.statistics().num_awaiting_reward, 0);
  }
}

// In one group after the other, so that every group is as old as its place says.
TEST(RolloutWorker, RunningSamplesGoOnUnderNewWeightsOnlyWhereTheyMayBeInterrupted) {
  for (const bool interruptible : {true, false}) {
    Harness run({.batch_groups = 2, .eta = 8, .longest = 400, .total = 40, .interruptible = interruptible});
    run.publish(0);
    int64_t mixed = 0;
    for (int64_t step = 0; step < 40; ++step)
      for (const FinishedGroup& group : run.step())
        for (const Trajectory& sample : group.samples) {
          std::set<int32_t> versions;
          for (size_t i = 0; i < sample.versions.size(); ++i)
            if (sample.loss_mask[i] != 0) versions.insert(sample.versions[i]);
          mixed += versions.size() > 1;
        }
    EXPECT_EQ(mixed > 0, interruptible);
    EXPECT_EQ(run.worker.statistics().interrupted_samples > 0, interruptible);
  }
}

TEST(RolloutWorker, NothingBeginsBeforeTheFirstPublication) {
  Harness run({.total = 2});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(run.next_id, 0);
  run.publish(0);
  EXPECT_EQ(run.step().size(), 2u);
}

TEST(RolloutWorker, WhatTheEngineThrowsReachesTheTrainer) {
  for (const bool own_thread : {true, false}) {
    Harness run({.own_thread = own_thread});
    run.engine.steps_before_error = 3;
    EXPECT_THROW(
        {
          run.publish(0);
          for (int step = 0; step < 10; ++step) run.step();
        },
        IoError);
    if (own_thread) {
      EXPECT_THROW(run.worker.while_suspended([] {}), IoError);
    }
  }
}

class BrokenReward final : public RewardFunction {
 public:
  std::vector<RewardResult> score_all(std::span<const RewardRequest>) override {
    throw IoError("the reward broke");
  }
};

TEST(RolloutWorker, WhatARewardThrowsReachesTheTrainer) {
  Harness run({});
  BrokenReward broken;
  StalenessGate gate(2, 1);
  ReplayBuffer buffer;
  SharedWeights weights(nullptr);
  SlowEngine engine(3);
  RolloutWorker worker({engine, weights, run.codec, broken, gate, buffer, run.clock},
                       [&] { return run.next_task(); }, {.own_thread = true});
  weights.publish(0);
  worker.weights_published();
  EXPECT_THROW(worker.wait_for(2, {}, {}), IoError);
}

// Of each call, the samples whose place in the group is in `failing`.
class FailingReward final : public RewardFunction {
 public:
  std::vector<RewardResult> score_all(std::span<const RewardRequest> requests) override {
    std::vector<RewardResult> results;
    for (size_t i = 0; i < requests.size(); ++i)
      results.push_back(fails(requests[i], i) ? failed_reward({}, "out of order")
                                              : RewardResult{.reward = 1});
    return results;
  }
  std::function<bool(const RewardRequest&, size_t)> fails;
};

struct FailingHarness : Harness {
  FailingHarness(const Shape& wanted, std::function<bool(const RewardRequest&, size_t)> fails)
      : Harness(wanted) {
    failing.fails = std::move(fails);
  }
  std::unique_ptr<RolloutWorker> make_worker(int64_t max_consecutive_failures) {
    return std::make_unique<RolloutWorker>(
        RolloutWorkerParts{own_engine, own_weights, codec, failing, own_gate, own_buffer, clock},
        [this] { return next_task(); },
        RolloutWorkerOptions{.generation = {.sampling = {.n_samples = 4}, .seed = 3},
                             .own_thread = shape.own_thread,
                             .max_consecutive_failures = max_consecutive_failures});
  }
  FailingReward failing;
  SlowEngine own_engine{3};
  SharedWeights own_weights{nullptr};
  StalenessGate own_gate{2, 1};
  ReplayBuffer own_buffer;
};

TEST(RolloutWorker, AGroupGoesOnWithTheSamplesThatHaveARewardOrIsDroppedAndReplaced) {
  for (const bool own_thread : {true, false}) {
    // Problem 0 fails but for one sample, problem 1 for two of four.
    FailingHarness run({.own_thread = own_thread}, [](const RewardRequest& request, size_t i) {
      return (request.problem->id == "p0" && i != 2) || (request.problem->id == "p1" && i < 2);
    });
    const auto worker = run.make_worker(1000);
    run.own_weights.publish(0);
    worker->weights_published();
    // Four groups have a slot at a time: 0 is dropped, and 4 takes its place.
    ASSERT_TRUE(worker->wait_for(4, {}, {}).enough);
    const auto batch = run.own_buffer.take(4).value();
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(batch[i].id, i + 1);
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(batch[0].samples[i].valid, i >= 2);
      EXPECT_EQ(batch[0].samples[i].reward.has_value(), i >= 2) << "a failed reward is nobody's zero";
      EXPECT_EQ(batch[0].samples[i].reward_failure.has_value(), i < 2);
    }
    EXPECT_EQ(worker->take_dropped(), std::vector<uint64_t>{0});
    EXPECT_TRUE(worker->take_dropped().empty());
    EXPECT_EQ(worker->statistics().dropped_groups, 1);
  }
}

TEST(RolloutWorker, RewardsThatFailOneAfterTheOtherEndTheRunAndSayWhose) {
  FailingHarness run({}, [](const RewardRequest&, size_t) { return true; });
  const auto worker = run.make_worker(50);
  run.own_weights.publish(0);
  worker->weights_published();
  try {
    worker->wait_for(2, {}, {});
    FAIL() << "nothing was thrown";
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("50 rewards all failed"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("out of order"), std::string::npos) << error.what();
  }
}

TEST(RolloutWorker, AStopIsSeenWhileTheTrainerWaits) {
  Harness run({.total = 1});
  int polls = 0;
  EXPECT_FALSE(run.worker.wait_for(1, [&] { return ++polls > 2; }, {}).enough);
}

TEST(RolloutWorker, AbandoningGivesEverySlotBack) {
  Harness run({.batch_groups = 8, .eta = 0, .longest = 50, .total = 0, .own_thread = false});
  run.publish(0);
  run.worker.wait_for(1, {}, {});
  run.worker.abandon();
  run.gate.drop_accepted(run.buffer.clear());
  run.worker.check_integrity();
  const StalenessGate::Counts counts = run.gate.counts();
  EXPECT_EQ(counts.accepted + counts.running, 0);
  EXPECT_EQ(run.step().size(), 8u);
}

}  // namespace
}  // namespace bough
