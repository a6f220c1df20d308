#include "control/replay_buffer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <thread>

#include "base/error.h"
#include "base/random.h"

namespace bough {
namespace {

FinishedGroup group(uint64_t id, int64_t n_samples = 2) {
  FinishedGroup out{.id = id, .problem = nullptr, .samples = {}};
  for (int64_t i = 0; i < n_samples; ++i) {
    Trajectory& sample = out.samples.emplace_back();
    sample.group = "g" + std::to_string(id);
    sample.input_ids = {1, 2, static_cast<int32_t>(i)};
    sample.loss_mask = {0, 1, 1};
    sample.logprobs = {0, -0.25f, -1.0f / 3};
    sample.versions = {-1, 4, 5};
    sample.reward = 0.1 * static_cast<double>(i);
    sample.completion = "text";
  }
  return out;
}

TEST(StalenessGate, SynchronousLetsOneBatchRunAtATime) {
  StalenessGate gate(3, 0);
  for (int64_t version = 0; version < 4; ++version) {
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(gate.try_start());
    EXPECT_FALSE(gate.try_start()) << "a batch runs";
    for (int i = 0; i < 3; ++i) gate.accept();
    EXPECT_FALSE(gate.try_start()) << "and has not been trained on";
    gate.set_version(version + 1);
  }
}

TEST(StalenessGate, LetsEtaBatchesRunAhead) {
  StalenessGate gate(2, 3);
  int64_t started = 0;
  while (gate.try_start()) ++started;
  EXPECT_EQ(started, 8);  // (0 + 3 + 1)·2
  gate.set_version(1);
  EXPECT_TRUE(gate.try_start());
  EXPECT_TRUE(gate.try_start());
  EXPECT_FALSE(gate.try_start());
  gate.drop_running();
  EXPECT_TRUE(gate.try_start()) << "a dropped group gives its slot back";
  gate.accept();
  gate.drop_accepted();
  EXPECT_TRUE(gate.try_start());
}

TEST(StalenessGate, GoesOnAfterARestartAsIfEveryStepHadUsedABatch) {
  StalenessGate gate(4, 1);
  gate.restore(7, 3);
  EXPECT_EQ(gate.counts().accepted, 31);
  int64_t started = 0;
  while (gate.try_start()) ++started;
  EXPECT_EQ(started, (7 + 1 + 1) * 4 - 31);
}

TEST(StalenessGate, WhatNobodyBeganCannotFinish) {
  StalenessGate gate(2, 0);
  EXPECT_THROW(gate.accept(), InternalError);
  EXPECT_THROW(gate.drop_running(), InternalError);
  EXPECT_THROW(gate.drop_accepted(), InternalError);
  gate.set_version(2);
  EXPECT_THROW(gate.set_version(1), InternalError);
}

TEST(ReplayBuffer, TheOldestLeaveFirstAndOnlyWholeBatches) {
  ReplayBuffer buffer;
  for (const uint64_t id : {5, 2, 9}) buffer.put(group(id));
  EXPECT_FALSE(buffer.take(4));
  EXPECT_EQ(buffer.size(), 3);
  const auto taken = buffer.take(2);
  ASSERT_TRUE(taken);
  EXPECT_EQ(taken->at(0).id, 2u);
  EXPECT_EQ(taken->at(1).id, 5u);
  EXPECT_THROW(buffer.put(group(9)), InternalError);
  EXPECT_EQ(buffer.clear(), 1);
}

TEST(ReplayBuffer, ASavedBufferComesBackAsItWas) {
  ReplayBuffer buffer, other;
  for (const uint64_t id : {3, 1}) buffer.put(group(id, 3));
  const Json saved = Json::parse(buffer.save().dump());
  other.put(group(8));
  other.restore(saved);
  EXPECT_EQ(other.save(), buffer.save());
  const auto groups = other.take(2);
  ASSERT_TRUE(groups);
  EXPECT_EQ(groups->at(1).samples[2].logprobs, group(3, 3).samples[2].logprobs) << "the same bits";
  EXPECT_EQ(groups->at(1).samples[2].reward, group(3, 3).samples[2].reward);
  EXPECT_THROW(other.restore(Json::parse(R"([{"id": 1}])")), UserError);
  EXPECT_THROW(other.restore(Json::parse(R"([{"id": 1, "samples": []}, {"id": 1, "samples": []}])")),
               UserError);
}

// Gate and buffer are compared with a model that keeps sets: groups are begun, finish in order or in any, are
// dropped, trained on, saved and restored.
TEST(GateAndBuffer, RandomOperationsKeepStalenessBoundedAndLoseNothing) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const CounterRandom random(seed, Purpose::test);
    const auto batch = static_cast<int64_t>(1 + random.below(4, 0, 0));
    const auto eta = static_cast<int64_t>(random.below(4, 0, 1));
    const bool in_order = seed % 2 == 0;  // groups finish as they began: no straggler is overtaken
    StalenessGate gate(batch, eta);
    ReplayBuffer buffer;
    int64_t version = 0;
    uint64_t next_id = 0;
    std::vector<uint64_t> running;
    std::set<uint64_t> buffered, trained;
    std::map<uint64_t, int64_t> begun_at;  // the trainer's version
    for (uint64_t i = 0; i < 600; ++i) {
      const uint64_t choice = random.below(8, 1, i);
      const bool may_start = static_cast<int64_t>(running.size() + buffered.size()) + batch * version <
                             (version + eta + 1) * batch;
      if (choice < 3) {
        ASSERT_EQ(gate.try_start(), may_start);
        if (may_start) {
          begun_at[next_id] = version;
          running.push_back(next_id++);
        }
      } else if (choice < 6 && !running.empty()) {
        const auto place = in_order ? 0 : static_cast<std::ptrdiff_t>(random.below(running.size(), 2, i));
        const uint64_t id = running[static_cast<size_t>(place)];
        running.erase(running.begin() + place);
        if (random.below(5, 3, i) == 0) {
          gate.drop_running();
          continue;
        }
        gate.accept();
        buffer.put(group(id));
        buffered.insert(id);
      } else if (choice == 6) {
        const auto taken = buffer.take(batch);
        ASSERT_EQ(taken.has_value(), static_cast<int64_t>(buffered.size()) >= batch);
        if (!taken) continue;
        for (const FinishedGroup& one : *taken) {
          EXPECT_EQ(one.id, *buffered.begin()) << "the oldest";
          buffered.erase(buffered.begin());
          EXPECT_TRUE(trained.insert(one.id).second) << "each leaves once";
          if (in_order) {
            EXPECT_LE(version - begun_at.at(one.id), eta);
          }
        }
        gate.set_version(++version);
      } else if (choice == 7 && random.below(10, 4, i) == 0) {  // a restart: what runs is lost
        const Json saved = buffer.save();
        running.clear();
        buffer.restore(saved);
        gate.restore(version, buffer.size());
      }
      gate.check_integrity();
      buffer.check_integrity();
      EXPECT_EQ(gate.counts().accepted, batch * version + buffer.size());
      EXPECT_EQ(gate.counts().running, static_cast<int64_t>(running.size()));
    }
    EXPECT_GT(version, 5);
  }
}

TEST(GateAndBuffer, OneThreadFillsAnotherEmpties) {
  constexpr int64_t kBatch = 4, kSteps = 200, kEta = 2;
  StalenessGate gate(kBatch, kEta);
  ReplayBuffer buffer;
  std::thread generator([&] {
    for (uint64_t id = 0; id < kBatch * kSteps;) {
      if (!gate.try_start()) {
        std::this_thread::yield();
        continue;
      }
      buffer.put(group(id++));
      gate.accept();
    }
  });
  uint64_t next = 0;
  for (int64_t version = 0; version < kSteps;) {
    const auto taken = buffer.take(kBatch);
    if (!taken) {
      std::this_thread::yield();
      continue;
    }
    for (const FinishedGroup& one : *taken) EXPECT_EQ(one.id, next++);
    gate.set_version(++version);
    gate.check_integrity();
  }
  generator.join();
  EXPECT_EQ(buffer.size(), 0);
  EXPECT_EQ(gate.counts().accepted, kBatch * kSteps);
}

}  // namespace
}  // namespace bough
