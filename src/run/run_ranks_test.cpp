// The protocol of a run's ranks, which are threads here.
#include "run/run_ranks.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/error.h"

namespace bough {
namespace {

void on_each_rank(int64_t num_ranks, const std::function<void(Communicator&)>& work) {
  auto ranks = thread_communicators(num_ranks);
  std::vector<std::thread> threads;
  for (auto& rank : ranks)
    threads.emplace_back([&work, &rank] {
      rank->set_deadline(60);
      work(*rank);
    });
  for (std::thread& thread : threads) thread.join();
}

// The sizes of a rank's groups; 0: it has no such group.
struct GroupSizes {
  int64_t trainers = 0, engines = 0, publication = 0;
  bool is_engine = false;
  bool operator==(const GroupSizes&) const = default;
};

std::vector<GroupSizes> sizes_of_groups(int64_t num_ranks, const RunSettings& settings) {
  std::vector<GroupSizes> sizes(static_cast<size_t>(num_ranks));
  on_each_rank(num_ranks, [&](Communicator& rank) {
    const RankGroups groups(&rank, settings);
    sizes[static_cast<size_t>(rank.rank())] = {
        .trainers = groups.trainers ? groups.trainers->size() : 0,
        .engines = groups.engines ? groups.engines->size() : 0,
        .publication = groups.publication ? groups.publication->all->size() : 0,
        .is_engine = groups.is_engine};
  });
  return sizes;
}

TEST(RankGroups, EveryRankTrainsAndGeneratesUnlessSomeOnlyGenerate) {
  RunSettings settings;
  const GroupSizes both{.trainers = 3, .engines = 3};
  EXPECT_EQ(sizes_of_groups(3, settings), (std::vector<GroupSizes>{both, both, both}));
  EXPECT_EQ(sizes_of_groups(1, settings), std::vector<GroupSizes>{{}});
  settings.rollout.backend = "vllm";
  EXPECT_EQ(sizes_of_groups(2, settings), (std::vector<GroupSizes>{{.trainers = 2}, {.trainers = 2}}));
}

TEST(RankGroups, TheLastRanksOnlyGenerateAndAreConnectedWithRankZero) {
  RunSettings settings;
  settings.rollout.ranks = 2;
  const GroupSizes engine{.engines = 3, .publication = 3, .is_engine = true};
  EXPECT_EQ(sizes_of_groups(4, settings),
            (std::vector<GroupSizes>{{.trainers = 2, .engines = 3, .publication = 3},
                                     {.trainers = 2, .engines = 1, .publication = 1},
                                     engine,
                                     engine}));
  const GroupSizes alone{.engines = 3, .publication = 3};
  EXPECT_EQ(sizes_of_groups(3, settings), (std::vector<GroupSizes>{alone, engine, engine}));
}

std::string refusal_of_ranks(const RunSettings& settings, int64_t num_ranks) {
  try {
    check_ranks(settings, num_ranks);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST(RunRanks, NumbersOfRanksThatCannotWorkAreRefused) {
  RunSettings settings;
  EXPECT_EQ(refusal_of_ranks(settings, 1), "");
  settings.rollout.ranks = 2;
  EXPECT_EQ(refusal_of_ranks(settings, 3), "");
  EXPECT_NE(refusal_of_ranks(settings, 2).find("rollout.ranks: got 2 of 2 processes"), std::string::npos);
  EXPECT_NE(refusal_of_ranks(settings, 1).find("of 1 process,"), std::string::npos);
  settings.actor.backend = "fsdp:t2";
  EXPECT_EQ(refusal_of_ranks(settings, 4), "");
  settings.rollout.ranks = 0;
  EXPECT_NE(refusal_of_ranks(settings, 2).find("none has the unsharded model"), std::string::npos);
  settings.rollout.backend = "vllm";
  EXPECT_EQ(refusal_of_ranks(settings, 2), "");
  settings.rollout.batch_invariant = true;
  EXPECT_NE(refusal_of_ranks(settings, 2).find("rollout.batch_invariant"), std::string::npos);
}

TEST(RunRanks, RankZeroSendsItsCheckpointOrNone) {
  const std::vector<std::optional<RunCheckpoint>> sent = {
      RunCheckpoint{12, "/runs/my first run/checkpoints/step_12"}, std::nullopt};
  on_each_rank(3, [&](Communicator& rank) {
    for (const auto& checkpoint : sent) {
      if (rank.rank() == 0) {
        send_checkpoint(checkpoint, rank);
        continue;
      }
      const auto received = receive_checkpoint(rank);
      ASSERT_EQ(received.has_value(), checkpoint.has_value());
      if (!checkpoint) continue;
      EXPECT_EQ(received->step, checkpoint->step);
      EXPECT_EQ(received->directory, checkpoint->directory);
    }
  });
}

TEST(RunBoth, RunsTwoFunctionsAtOnce) {
  auto of_here = thread_communicators(2);
  std::string received;
  // Each function waits for the other one.
  run_both([&] { of_here[0]->broadcast("hello"); }, {of_here[0].get()},
           [&] { received = of_here[1]->broadcast(""); }, {of_here[1].get()});
  EXPECT_EQ(received, "hello");
}

TEST(RunBoth, AnExceptionOfOneFunctionEndsTheWaitOfTheOther) {
  for (const bool fails_beside : {true, false}) {
    auto ranks = thread_communicators(2);  // rank 0 never sends
    const auto fails = [] { throw IoError("the disk is full"); };
    const auto waits = [&] { ranks[1]->await_broadcast(); };
    const std::vector<Communicator*> of_waits = {ranks[1].get()};
    try {
      if (fails_beside) run_both(fails, {}, waits, of_waits);
      else run_both(waits, of_waits, fails, {});
      FAIL() << "the exception is lost";
    } catch (const IoError& error) {
      EXPECT_STREQ(error.what(), "the disk is full");
    }
  }
}

}  // namespace
}  // namespace bough
