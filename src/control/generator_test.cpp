#include "control/generator.h"

#include <gtest/gtest.h>

#include "control/fakes.h"

namespace bough {
namespace {

using testing::ByteCodec;
using testing::FakeEngine;
using testing::FakeReward;

// `n` plain prompts.
Generator::TaskSource prompts(int64_t n) {
  return [n, next = int64_t{0}]() mutable -> std::optional<GroupTask> {
    if (next == n) return std::nullopt;
    const int64_t i = next++;
    return GroupTask{.id = static_cast<uint64_t>(i), .name = str("g", i), .prompt_ids = {1, 2}};
  };
}

GeneratorOptions samples_of(int64_t n_samples, int64_t in_flight = 256) {
  GeneratorOptions options{.seed = 3, .samples_in_flight = in_flight};
  options.sampling.n_samples = n_samples;
  return options;
}

TEST(Generator, GroupsStandInTheOrderOfTheTasks) {
  FakeEngine engine;  // the last submitted finishes first
  Generator generator({engine}, prompts(9), samples_of(2));
  const auto groups = generator.collect(9, {});
  ASSERT_TRUE(groups);
  ASSERT_EQ(groups->size(), 9u);
  for (uint64_t i = 0; i < 9; ++i) {
    EXPECT_EQ((*groups)[i].id, i);
    ASSERT_EQ((*groups)[i].samples.size(), 2u);
    EXPECT_EQ((*groups)[i].samples[0].group, str("g", i));
    EXPECT_FALSE((*groups)[i].samples[0].prompt) << "a plain prompt has no texts";
  }
  EXPECT_TRUE(generator.idle());
}

TEST(Generator, KeepsABoundedNumberInFlight) {
  FakeEngine engine;
  Generator generator({engine}, prompts(20), samples_of(4, 10));
  std::vector<int64_t> progress;
  CollectOptions options;
  options.on_progress = [&](int64_t done, int64_t total) {
    EXPECT_EQ(total, 20);
    progress.push_back(done);
  };
  ASSERT_TRUE(generator.collect(20, options));
  EXPECT_EQ(engine.most_samples_in_flight, 12);  // a group begins while fewer than 10 are in flight
  ASSERT_EQ(progress.size(), 20u);
  for (int64_t i = 0; i < 20; ++i) EXPECT_EQ(progress[static_cast<size_t>(i)], i + 1);
}

TEST(Generator, AStopLeavesTheEngineIdle) {
  FakeEngine engine;
  Generator generator({engine}, prompts(9), samples_of(2));
  CollectOptions options;
  int polls = 0;
  options.stop = [&] { return ++polls == 3; };
  EXPECT_FALSE(generator.collect(5, options));
  EXPECT_TRUE(engine.idle());
  EXPECT_TRUE(generator.idle());
}

TEST(Generator, AnErrorOfTheEngineLeavesItIdle) {
  FakeEngine engine;
  engine.steps_before_error = 3;
  Generator generator({engine}, prompts(9), samples_of(2));
  EXPECT_THROW(generator.collect(9, {}), IoError);
  EXPECT_TRUE(engine.idle());
}

TEST(Generator, APromptThatCannotBeAskedBeginsNothing) {
  FakeEngine engine;
  const ByteCodec codec;
  const Problem empty{.id = "empty", .prompt = "", .messages = {}, .answer = ""};
  Generator generator(
      {.engine = engine, .codec = &codec},
      [&] { return GroupTask{.id = 1, .name = "empty", .problem = &empty}; }, samples_of(2));
  EXPECT_THROW(generator.step(), UserError);
  EXPECT_TRUE(generator.idle());
}

TEST(Generator, RewardsAreThoseOfTheVeryCompletions) {
  FakeEngine engine;
  FakeReward reward;
  const ByteCodec codec;
  const Dataset problems = testing::numbered_problems(9);
  Generator generator({engine, &codec}, tasks_of(problems), samples_of(3));
  auto groups = generator.collect(9, {}).value();
  const std::vector<RewardResult> rewards = score(groups, reward);
  ASSERT_EQ(rewards.size(), 27u);
  int64_t num_failed = 0;
  for (size_t i = 0; i < rewards.size(); ++i) {
    Trajectory& sample = groups[i / 3].samples[i % 3];
    EXPECT_FALSE(sample.reward);
    set_reward(sample, rewards[i]);
    const int digit = sample.completion->back() - '0';
    EXPECT_EQ(sample.reward, digit != 9 && digit % 2 == 0 ? 1.0 : 0.0);
    EXPECT_EQ(sample.reward_failure.has_value(), digit == 9);
    EXPECT_EQ(*sample.prompt, str("Q", *sample.answer, " "));
    num_failed += digit == 9;
  }
  EXPECT_GT(num_failed, 0) << "the seed must draw a nine";
  EXPECT_THROW(generator.collect(1, {}), InternalError) << "nothing runs and nothing may begin";
}

TEST(CompletionText, EndsBeforeStopTokensAndStopStrings) {
  const ByteCodec codec;
  EXPECT_EQ(completion_text(codec, {{'4', '2', 258}, {}, {}, {}, {}, FinishReason::kStop}, {}), "42");
  EXPECT_EQ(completion_text(codec, {{'4', '2'}, {}, {}, {}, {}, FinishReason::kLength}, {"2"}), "42");
  EXPECT_EQ(completion_text(codec, {{'4', '\n', 'Q', ':'}, {}, {}, {}, {}, FinishReason::kStopString},
                            {"Q:", "\n"}),
            "4");
}

}  // namespace
}  // namespace bough
