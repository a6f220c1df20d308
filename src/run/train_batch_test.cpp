#include "run/train_batch.h"

#include <gtest/gtest.h>

#include <set>

#include "base/error.h"
#include "control/fakes.h"
#include "train/sequence_steps.h"
#include "train/trainer.h"

namespace bough {
namespace {

using testing::ByteCodec;
using testing::FakeEngine;
using testing::FakeReward;

class FakeTrainer final : public BatchTrainer {
 public:
  MetricValues train_step(const std::vector<Trajectory>& batch) override {
    batches.push_back(batch);
    return {{"loss/policy", 0.25}};
  }
  int64_t peak_bytes() const override { return 12345; }
  std::vector<std::vector<Trajectory>> batches;
};

// The problems at the positions [next, end), over and over.
class SomeProblems final : public TaskSource {
 public:
  SomeProblems(const Dataset& problems, int64_t next, int64_t end)
      : problems_(problems), next_(static_cast<uint64_t>(next)), end_(static_cast<uint64_t>(end)) {}
  std::optional<GroupTask> next() override {
    if (next_ == end_) return std::nullopt;
    return problems_.task(next_++);
  }

 private:
  testing::RepeatedProblems problems_;
  uint64_t next_, end_;
};

// Groups as the engine and the rewards return them, out of the order in which they were requested.
TrainOrder order_of(int64_t first, int64_t count, int64_t n_samples, bool with_baseline = false) {
  static const Dataset problems = testing::numbered_problems(7);
  FakeEngine engine;
  FakeReward reward;
  const ByteCodec codec;
  GeneratorOptions options{.seed = 5, .with_baseline = with_baseline};
  options.sampling.n_samples = n_samples;
  SomeProblems tasks(problems, first, first + count);
  Generator generator({engine, &codec}, tasks, options);
  auto groups = generator.collect(count, {}).value();
  const std::vector<RewardResult> rewards = score(groups, reward);
  auto result = rewards.begin();
  TrainOrder order{.step = 1, .groups = {}};
  for (FinishedGroup& group : groups) {
    for (Trajectory& sample : group.samples) set_reward(sample, *result++);
    order.groups.push_back({std::make_shared<const FinishedGroup>(group), {}});
  }
  return order;
}

TEST(TrainBatch, TrainsOnWholeGroupsWithTheirAdvantagesAndReportsMetrics) {
  RunSettings settings;
  FakeTrainer trainer;
  const StepRecord record = train_batch(order_of(0, 3, 8), settings, trainer);
  EXPECT_EQ(record.step, 1);
  ASSERT_EQ(trainer.batches.size(), 1u);
  const std::vector<Trajectory>& batch = trainer.batches[0];
  ASSERT_EQ(batch.size(), 24u);
  double rewards = 0, failures = 0;
  for (int64_t group = 0; group < 3; ++group) {
    double sum = 0;
    std::set<std::string> prompts, groups;
    for (int64_t i = 8 * group; i < 8 * group + 8; ++i) {
      const Trajectory& rollout = batch[static_cast<size_t>(i)];
      groups.insert(rollout.group);
      if (!rollout.advantage.empty()) sum += rollout.advantage.at(0);
      prompts.insert(*rollout.prompt);
      const int digit = rollout.completion->back() - '0';
      if (digit != 9) {
        EXPECT_EQ(rollout.reward, digit % 2 == 0 ? 1.0 : 0.0);
      }
      rewards += rollout.reward.value_or(0);
      failures += rollout.reward_failure.has_value();
      EXPECT_EQ(str("Q", *rollout.answer, " "), *rollout.prompt);
      EXPECT_EQ(rollout.group, "p" + *rollout.answer);
      EXPECT_EQ(rollout.input_ids[rollout.input_ids.size() - 2], '0' + digit);
      EXPECT_EQ(rollout.loss_mask, (std::vector<uint8_t>{0, 0, 0, 1, 1}));
    }
    EXPECT_EQ(prompts.size(), 1u);
    EXPECT_EQ(groups.size(), 1u);
    EXPECT_NEAR(sum, 0, 1e-6);  // sum of floats
  }
  EXPECT_DOUBLE_EQ(record.metrics.at("reward/mean"), rewards / 24);
  EXPECT_EQ(record.metrics.at("reward/failures"), failures);
  EXPECT_GT(failures, 0) << "the seed must draw a nine";
  EXPECT_EQ(record.metrics.at("rollout/length_mean"), 2);
  EXPECT_EQ(record.metrics.at("rollout/truncated_fraction"), 0);
  EXPECT_EQ(record.metrics.at("loss/policy"), 0.25);
  EXPECT_EQ(record.metrics.at("memory/peak"), 12345) << "of the trainer's device, not of the process";
}

// A conversation of several rows of the batch counts as one sample in the reward metrics.
TEST(TrainBatch, RewardMetricsCountTrajectoriesNotRows) {
  TrainOrder order = order_of(0, 1, 2);
  auto group = std::make_shared<FinishedGroup>(*order.groups[0].group);
  Trajectory one = group->samples[0], other = group->samples[0];
  one.trajectory = "0";
  one.reward = 1;
  one.rewards = {{"style", 4}};
  one.reward_failure.reset();
  other.trajectory = "1";
  other.reward = 0;
  other.rewards = {{"style", 0}};
  other.reward_failure.reset();
  group->samples = {one, one, one, other};
  order.groups[0].group = group;
  FakeTrainer trainer;
  const MetricValues metrics = train_batch(order, {}, trainer).metrics;
  EXPECT_EQ(metrics.at("reward/mean"), 0.5);
  EXPECT_EQ(metrics.at("reward/style/mean"), 2);
}

// Staleness is per group, by the group's oldest token. Age is per token.
TEST(TrainBatch, GroupsAreAsStaleAsTheirOldestToken) {
  TrainOrder order = order_of(0, 2, 2);
  order.step = 6;
  for (int64_t g = 0; g < 2; ++g) {
    auto group = std::make_shared<FinishedGroup>(*order.groups[static_cast<size_t>(g)].group);
    for (Trajectory& sample : group->samples) sample.versions = {-1, -1, -1, 5, 5};
    if (g == 1) group->samples[0].versions = {-1, -1, -1, 1, 4};
    order.groups[static_cast<size_t>(g)].group = std::move(group);
  }
  FakeTrainer trainer;
  const MetricValues metrics = train_batch(order, {}, trainer).metrics;
  EXPECT_EQ(metrics.at("staleness/mean"), 2);  // 0 and 4
  EXPECT_EQ(metrics.at("staleness/max"), 4);
  EXPECT_EQ(metrics.at("age/mean"), (4 + 1) / 8.0);
  EXPECT_EQ(metrics.at("age/max"), 4);
}

TEST(TrainBatch, AProblemThatTheBatchHasTwiceIsTwoGroups) {
  RunSettings settings;
  FakeTrainer trainer;
  train_batch(order_of(5, 9, 2), settings, trainer);
  std::set<std::string> groups;
  for (const Trajectory& sample : trainer.batches[0]) groups.insert(sample.group);
  EXPECT_EQ(groups.size(), 9u);
  EXPECT_TRUE(groups.contains("p5 (2)"));
}

TEST(TrainBatch, FiltersTakeSequencesOutOfTrainingAndAreCounted) {
  RunSettings settings;
  settings.actor.filters.dynamic_sampling = true;
  FakeTrainer trainer;
  const StepRecord record = train_batch(order_of(0, 15, 2), settings, trainer);
  int64_t equal = 0;
  for (size_t i = 0; i < record.batch.size(); i += 2) {
    const bool same = record.batch[i].reward == record.batch[i + 1].reward;
    equal += same;
    EXPECT_EQ(record.batch[i].trained, !same);
  }
  EXPECT_GT(equal, 0);
  EXPECT_EQ(record.metrics.at("rollout/sequences_dropped"), 2 * equal);
}

// The trainer computes the acceptance of every sample before any sample is chosen. The two samples of each
// group with the highest acceptance are trained on.
TEST(TrainBatch, SamplesAreChosenByTheirAcceptance) {
  class AcceptingTrainer final : public BatchTrainer {
   public:
    MetricValues train_step(const std::vector<Trajectory>&) override { return {}; }
    int64_t peak_bytes() const override { return 0; }
    void set_acceptance(std::vector<Trajectory>& batch) override {
      for (size_t i = 0; i < batch.size(); ++i)
        batch[i].columns[kAcceptanceColumn].assign(batch[i].input_ids.size(), share(i));
    }
    static double share(size_t i) { return static_cast<double>(i * 7 % 5) / 5; }  // five different values
  };
  RunSettings settings;
  settings.actor.filters.keep_samples = 2;
  settings.actor.filters.keep_samples_by = "acceptance";
  AcceptingTrainer trainer;
  const StepRecord record = train_batch(order_of(0, 6, 5), settings, trainer);
  ASSERT_EQ(record.batch.size(), 30u);
  double kept = 0;
  for (size_t i = 0; i < 30; ++i) {
    if (!record.batch[i].valid) continue;
    size_t nearer = 0;
    for (size_t j = i / 5 * 5; j < i / 5 * 5 + 5; ++j)
      nearer += record.batch[j].valid && AcceptingTrainer::share(j) > AcceptingTrainer::share(i);
    EXPECT_EQ(record.batch[i].trained, nearer < 2) << i;
    kept += record.batch[i].trained;
  }
  EXPECT_EQ(kept, 12);
  EXPECT_GT(record.metrics.at("oversampling/acceptance_3"), record.metrics.at("oversampling/acceptance_2"));
  EXPECT_TRUE(record.metrics.contains("oversampling/reward_2"));
  // If samples are kept by reward, no plan is executed and no acceptance is reported.
  settings.actor.filters.keep_samples_by = "reward";
  const MetricValues metrics = train_batch(order_of(0, 6, 5), settings, trainer).metrics;
  EXPECT_FALSE(metrics.contains("oversampling/acceptance_2"));
  EXPECT_GE(metrics.at("oversampling/reward_3"), metrics.at("oversampling/reward_2"));
  FakeTrainer silent;
  settings.actor.filters.keep_samples_by = "acceptance";
  EXPECT_THROW(train_batch(order_of(0, 6, 5), settings, silent), UserError);
}

// FakeReward is 1 if the response ends with an even digit. The baseline response is left out of the mean of
// the rewards, of all counts and of the loss.
TEST(TrainBatch, TheMostLikelyResponseIsABaselineAndNothingElse) {
  RunSettings settings;
  settings.actor.advantages.adv_estimator = "remax";
  settings.actor.filters.truncated_samples = "drop";
  settings.actor.filters.keep_samples = 3;
  settings.actor.shaping.reward_scaling = 2.0;
  FakeTrainer trainer;
  TrainOrder order = order_of(0, 8, 4, /*with_baseline=*/true);
  // If the baseline could not be scored, its group has nothing to be compared with.
  auto lost = std::make_shared<FinishedGroup>(*order.groups[0].group);
  lost->samples[4].valid = false;
  lost->samples[4].reward.reset();
  order.groups[0].group = lost;
  const StepRecord record = train_batch(order, settings, trainer);
  ASSERT_EQ(record.batch.size(), 40u);
  double rewards = 0, baselines = 0, num_rewards = 0, num_baselines = 0;
  std::set<float> advantages;
  for (size_t i = 0; i < 40; ++i) {
    const Trajectory& row = record.batch[i];
    const Trajectory& baseline = record.batch[i / 5 * 5 + 4];
    EXPECT_EQ(row.baseline, i % 5 == 4);
    (row.baseline ? baselines : rewards) += row.reward.value_or(0);
    (row.baseline ? num_baselines : num_rewards) += row.reward.has_value();
    EXPECT_EQ(row.in_loss() && (i < 5 || !baseline.reward || row.baseline), false);
    if (!row.in_loss()) continue;
    EXPECT_EQ(row.advantage, std::vector<float>{static_cast<float>(2 * (*row.reward - *baseline.reward))});
    advantages.insert(row.advantage[0]);
  }
  EXPECT_EQ(advantages, (std::set<float>{-2, 0, 2}));
  EXPECT_EQ(record.metrics.at("reward/mean"), rewards / num_rewards);
  EXPECT_EQ(record.metrics.at("reward/baseline_mean"), baselines / num_baselines);
  EXPECT_NE(rewards / num_rewards, baselines / num_baselines);
  EXPECT_EQ(record.metrics.at("rollout/length_mean"), 2);
  // If the estimator is not remax, baselines change nothing: the advantages equal those without baselines.
  const StepRecord grpo = train_batch(order_of(0, 8, 4), {}, trainer);
  RunSettings plain;
  const StepRecord beside = train_batch(order_of(0, 8, 4, true), plain, trainer);
  for (size_t i = 0; i < 32; ++i)
    EXPECT_EQ(beside.batch[i / 4 * 5 + i % 4].advantage, grpo.batch[i].advantage);
  EXPECT_EQ(beside.metrics.at("reward/failures"), grpo.metrics.at("reward/failures"));
  try {
    train_batch(order_of(0, 2, 4), settings, trainer);
    FAIL() << "no baseline";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("baseline"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace bough
