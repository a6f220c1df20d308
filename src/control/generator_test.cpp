#include "control/generator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>

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

TEST(Generator, AStopLeavesTheEngineIdleAndTheGateAsItWas) {
  FakeEngine engine;
  StalenessGate gate(5, 0);
  Generator generator({.engine = engine, .gate = &gate}, prompts(9), samples_of(2));
  CollectOptions options;
  int polls = 0;
  options.stop = [&] { return ++polls == 3; };
  EXPECT_FALSE(generator.collect(5, options));
  EXPECT_TRUE(engine.idle());
  EXPECT_TRUE(generator.idle());
  EXPECT_EQ(gate.counts().running, 0);
  EXPECT_EQ(gate.counts().accepted, 0);
}

TEST(Generator, AnErrorOfTheEngineLeavesItIdle) {
  FakeEngine engine;
  engine.steps_before_error = 3;
  Generator generator({engine}, prompts(9), samples_of(2));
  EXPECT_THROW(generator.collect(9, {}), IoError);
  EXPECT_TRUE(engine.idle());
}

TEST(Generator, APromptThatCannotBeAskedTakesNoSlot) {
  FakeEngine engine;
  StalenessGate gate(5, 0);
  const ByteCodec codec;
  const Problem empty{.id = "empty", .prompt = "", .messages = {}, .answer = ""};
  Generator generator(
      {.engine = engine, .codec = &codec, .gate = &gate},
      [&] { return GroupTask{.id = 1, .name = "empty", .problem = &empty}; }, samples_of(2));
  EXPECT_THROW(generator.step(), UserError);
  EXPECT_EQ(gate.counts().running, 0);
  EXPECT_TRUE(generator.idle());
}

TEST(Generator, BeginsWhatTheGateAllowsAndScoresAGroupAsItFinishes) {
  FakeEngine engine;
  FakeReward reward;
  const ByteCodec codec;
  StalenessGate gate(2, 1);
  const Dataset problems = testing::numbered_problems(9);
  Generator generator({engine, &codec, &reward, &gate}, tasks_of(problems), samples_of(3));
  ReplayBuffer buffer;
  for (int i = 0; i < 20; ++i) {
    for (FinishedGroup& group : generator.step()) {
      EXPECT_FALSE(group.samples[0].reward);
      generator.score(std::span(&group, 1));
      for (const Trajectory& sample : group.samples) {
        const int digit = sample.completion->back() - '0';
        EXPECT_EQ(sample.reward, digit != 9 && digit % 2 == 0 ? 1.0 : 0.0);
        EXPECT_EQ(sample.reward_failure.has_value(), digit == 9);
        EXPECT_EQ(*sample.prompt, str("Q", *sample.answer, " "));
      }
      buffer.put(std::move(group));
    }
    generator.check_integrity();
    gate.check_integrity();
  }
  EXPECT_EQ(engine.submitted.size(), 4u);  // (0 + 1 + 1)·2
  EXPECT_EQ(buffer.size(), 4);
  EXPECT_EQ(gate.counts().accepted, 4);
  EXPECT_THROW(generator.collect(1, {}), InternalError) << "nothing runs and nothing may begin";
}

TEST(Generator, GroupsFromElsewhereAreHandedOutWithItsOwn) {
  FakeEngine engine;
  StalenessGate gate(3, 0);
  Generator generator({.engine = engine, .gate = &gate}, prompts(2), samples_of(1));
  ASSERT_TRUE(gate.try_start());
  FinishedGroup session{.id = 100, .problem = nullptr, .samples = {}};
  session.samples.emplace_back().group = "session";
  generator.hand_in(std::move(session));
  EXPECT_FALSE(generator.idle());
  const auto groups = generator.collect(3, {});
  ASSERT_TRUE(groups);
  EXPECT_EQ(groups->back().samples[0].group, "session");
  EXPECT_EQ(gate.counts().accepted, 3);
}

// Random operations; every group that began is handed out once or dropped, and slots agree.
TEST(Generator, RandomOperationsLoseNothing) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    const CounterRandom random(seed, Purpose::test);
    FakeEngine engine;
    StalenessGate gate(3, 2);
    uint64_t next_id = 0;
    Generator generator(
        {.engine = engine, .gate = &gate},
        [&] { return GroupTask{.id = next_id++, .name = "g", .prompt_ids = {1}}; }, samples_of(2, 7));
    int64_t handed_out = 0, version = 0;
    for (uint64_t i = 0; i < 300; ++i) {
      const uint64_t choice = random.below(10, 0, i);
      if (choice < 6) handed_out += static_cast<int64_t>(generator.step().size());
      else if (choice == 6 && gate.try_start())
        generator.hand_in({.id = next_id++, .problem = nullptr, .samples = {}});
      else if (choice == 7) generator.abandon();
      else if (choice == 8 && handed_out >= 3 * (version + 1)) gate.set_version(++version);
      generator.check_integrity();
      gate.check_integrity();
      EXPECT_EQ(gate.counts().accepted, handed_out);
      if (choice == 7) {
        EXPECT_TRUE(generator.idle());
        EXPECT_EQ(gate.counts().running, 0);
      }
    }
    EXPECT_GT(version, 3);
  }
}

// One thread generates and scores, another hands sessions in, a third trains.
TEST(Generator, SessionsAndTrainingRunBesideIt) {
  constexpr int64_t kBatch = 4, kSteps = 40;
  FakeEngine engine;
  FakeReward reward;
  const ByteCodec codec;
  StalenessGate gate(kBatch, 1);
  ReplayBuffer buffer;
  const Dataset problems = testing::numbered_problems(1);
  std::atomic<uint64_t> next_id = 0;
  Generator generator(
      {engine, &codec, &reward, &gate},
      [&] { return GroupTask{.id = next_id++, .name = "p", .problem = &problems[0]}; }, samples_of(2));
  std::atomic<bool> done = false;
  std::thread sessions([&] {
    while (!done) {
      if (gate.try_start()) generator.hand_in({.id = next_id++, .problem = nullptr, .samples = {}});
      std::this_thread::yield();
    }
  });
  std::thread trainer([&] {
    std::set<uint64_t> seen;
    for (int64_t version = 0; version < kSteps;) {
      const auto batch = buffer.take(kBatch);
      if (!batch) {
        std::this_thread::yield();
        continue;
      }
      for (const FinishedGroup& group : *batch) EXPECT_TRUE(seen.insert(group.id).second);
      gate.set_version(++version);
    }
    done = true;
  });
  while (!done) {
    auto groups = generator.step();
    generator.score(groups);
    for (FinishedGroup& group : groups) buffer.put(std::move(group));
  }
  trainer.join();
  sessions.join();
  generator.abandon();
  gate.check_integrity();
  EXPECT_EQ(gate.counts().running, 0);
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
