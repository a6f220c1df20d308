#include "control/controller.h"

#include <gtest/gtest.h>

#include <set>

#include "control/control_test_util.h"
#include "data/rollout_file.h"

namespace bough {
namespace {

using testing::FakeEngine;
using testing::FakeReward;
using testing::FakeTrainer;

class ControllerTest : public ::testing::Test {
 protected:
  ControllerTest() {
    settings_.train_dataset.batch_size = 3;
    settings_.gconfig.n_samples = 8;
    settings_.seed = 5;
  }
  Controller controller() {
    return Controller({settings_, problems_, encoder_, engine_, reward_, trainer_, weights_, clock_});
  }

  std::vector<uint64_t> submitted_ids() const {
    std::vector<uint64_t> ids;
    for (const GenerationRequest& request : engine_.submitted) ids.push_back(request.id);
    return ids;
  }

  RunSettings settings_;
  Dataset problems_ = testing::numbered_problems(7);
  PromptEncoder encoder_ = testing::byte_level_encoder();
  FakeClock clock_;
  FakeEngine engine_{&clock_};
  FakeReward reward_;
  FakeTrainer trainer_;
  SharedWeights weights_{nullptr};
};

TEST_F(ControllerTest, AStepTrainsOnWholeGroupsWithTheirAdvantages) {
  Controller controller = this->controller();
  const auto record = controller.step();
  ASSERT_TRUE(record);
  EXPECT_EQ(record->step, 1);
  ASSERT_EQ(trainer_.batches.size(), 1u);
  const std::vector<Trajectory>& batch = trainer_.batches[0];
  ASSERT_EQ(batch.size(), 24u);
  for (int64_t group = 0; group < 3; ++group) {
    double sum = 0;
    std::set<std::string> prompts, groups;
    for (int64_t i = 8 * group; i < 8 * group + 8; ++i) {
      const Trajectory& rollout = batch[static_cast<size_t>(i)];
      groups.insert(rollout.group);
      sum += rollout.advantage.at(0);
      prompts.insert(*rollout.prompt);
      // The reward is that of this very completion: results came back in another order than they were asked
      // for.
      const int digit = rollout.completion->back() - '0';
      EXPECT_EQ(rollout.reward, digit % 2 == 0 ? 1.0 : 0.0);
      EXPECT_EQ(str("Q", *rollout.answer, " "), *rollout.prompt);
      EXPECT_EQ(rollout.group, "p" + *rollout.answer);
      EXPECT_EQ(rollout.input_ids[rollout.input_ids.size() - 2], '0' + digit);
      EXPECT_EQ(rollout.loss_mask, (std::vector<uint8_t>{0, 0, 0, 1, 1}));
    }
    EXPECT_EQ(prompts.size(), 1u);
    EXPECT_EQ(groups.size(), 1u);
    EXPECT_NEAR(sum, 0, 1e-6);  // of floats
  }
}

TEST_F(ControllerTest, MetricsAreThoseOfTheSamplesAndOfTheClock) {
  Controller controller = this->controller();
  const MetricValues metrics = controller.step()->metrics;
  double rewards = 0, failures = 0;
  for (const Trajectory& rollout : trainer_.batches[0]) {
    rewards += *rollout.reward;
    failures += rollout.reward_failure.has_value();
  }
  EXPECT_DOUBLE_EQ(metrics.at("reward/mean"), rewards / 24);
  EXPECT_EQ(metrics.at("reward/failures"), failures);
  EXPECT_GT(failures, 0) << "the seed must draw a nine";
  EXPECT_EQ(metrics.at("rollout/length_mean"), 2);
  EXPECT_EQ(metrics.at("rollout/truncated_fraction"), 0);
  EXPECT_EQ(metrics.at("time/rollout"), 3);  // three requests, one a step, a second each
  EXPECT_EQ(metrics.at("perf/generated_tokens_per_s"), 16);
  EXPECT_EQ(metrics.at("time/step"), 3);
  EXPECT_EQ(metrics.at("loss/policy"), 0.25);
}

TEST_F(ControllerTest, EveryStepMeetsTheNextProblemsUnderTheNextVersion) {
  Controller controller = this->controller();
  for (int step = 0; step < 4; ++step) {
    EXPECT_TRUE(controller.step());
    EXPECT_EQ(engine_.version(), step + 1);
    EXPECT_EQ(trainer_.batches.back()[0].versions.back(), step);
  }
  std::vector<uint64_t> expected(12);
  for (uint64_t i = 0; i < 12; ++i) expected[i] = i;
  EXPECT_EQ(submitted_ids(), expected);
  std::set<std::string> first_epoch;
  for (size_t i = 0; i < 7; ++i) first_epoch.insert(trainer_.batches[i / 3][8 * (i % 3)].prompt.value());
  EXPECT_EQ(first_epoch.size(), 7u);
}

TEST_F(ControllerTest, AStopDuringTheRolloutAbandonsTheStepAndItIsDrawnAgainTheSame) {
  Controller controller = this->controller();
  int polls = 0;
  EXPECT_FALSE(controller.step([&] { return ++polls > 2; }));
  EXPECT_TRUE(engine_.idle());
  EXPECT_TRUE(trainer_.batches.empty());
  EXPECT_EQ(controller.num_steps(), 0);
  ASSERT_TRUE(controller.step());
  Controller never_stopped = this->controller();
  ASSERT_TRUE(never_stopped.step());
  ASSERT_EQ(trainer_.batches.size(), 2u);
  for (size_t i = 0; i < 24; ++i)
    EXPECT_EQ(rollout_to_json(trainer_.batches[0][i]), rollout_to_json(trainer_.batches[1][i]));
}

TEST_F(ControllerTest, ARestoredControllerGoesOnWhereTheOtherStood) {
  Controller first = this->controller();
  ASSERT_TRUE(first.step());
  const Json saved = Json::parse(first.save().dump());
  ASSERT_TRUE(first.step());
  Controller second = this->controller();
  second.restore(saved);
  EXPECT_EQ(second.num_steps(), 1);
  const auto record = second.step();
  ASSERT_TRUE(record);
  EXPECT_EQ(record->step, 2);
  for (size_t i = 0; i < 24; ++i)
    EXPECT_EQ(rollout_to_json(trainer_.batches[1][i]), rollout_to_json(trainer_.batches[2][i]));
}

TEST_F(ControllerTest, AnotherDataSetIsRefusedOnResume) {
  Controller first = this->controller();
  const Json saved = first.save();
  problems_ = testing::numbered_problems(8);
  Controller second = this->controller();
  EXPECT_THROW(second.restore(saved), UserError);
}

TEST_F(ControllerTest, FiltersTakeSequencesOutOfTrainingAndAreCounted) {
  settings_.gconfig.n_samples = 2;
  settings_.actor.filters.dynamic_sampling = true;
  Controller controller = this->controller();
  int64_t dropped = 0, equal = 0;
  for (int step = 0; step < 5; ++step) {
    const auto record = controller.step();
    dropped += static_cast<int64_t>(record->metrics.at("rollout/sequences_dropped"));
    for (size_t i = 0; i < record->batch.size(); i += 2) {
      const bool same = record->batch[i].reward == record->batch[i + 1].reward;
      equal += same;
      EXPECT_EQ(record->batch[i].trained, !same);
    }
  }
  EXPECT_GT(equal, 0);
  EXPECT_EQ(dropped, 2 * equal);
}

}  // namespace
}  // namespace bough
