// Tests that every kind of Communicator must pass. A test program instantiates the suite for its kinds of
// groups of ranks. tests/runs/test_ranks.py tests the MPI communicator.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/communicator.h"

namespace bough {

using Groups = std::vector<std::unique_ptr<Communicator>>;

// A kind of group of ranks. make() returns a new group; the thread that acts as rank r uses element r.
struct GroupKind {
  const char* name;
  std::function<Groups(int64_t size)> make;
};

class CommunicatorTest : public testing::TestWithParam<GroupKind> {
 protected:
  // Runs the body on one thread per rank. Each thread then destroys its communicator.
  static void on_ranks(Groups ranks, const std::function<void(Communicator&)>& body) {
    std::vector<std::thread> threads;
    for (auto& rank : ranks)
      threads.emplace_back([&body, &rank] {
        body(*rank);
        rank.reset();
      });
    for (std::thread& thread : threads) thread.join();
  }
  static void on_ranks(int64_t size, const std::function<void(Communicator&)>& body) {
    on_ranks(GetParam().make(size), body);
  }
};

TEST_P(CommunicatorTest, SumsInRankOrderOnEveryRank) {
  for (const int64_t size : {1, 2, 3, 8})
    on_ranks(size, [&](Communicator& ranks) {
      // 1e16 + 1 rounds to 1e16. In another order the sum would differ.
      std::vector<double> values = {static_cast<double>(ranks.rank()), ranks.rank() == 0 ? 1e16 : 1.0};
      ranks.all_reduce(std::span<double>(values));
      EXPECT_EQ(values[0], static_cast<double>(size * (size - 1)) / 2);
      EXPECT_EQ(values[1], 1e16);
      std::vector<float> floats(5, 1.5f);
      ranks.all_reduce(std::span<float>(floats));
      EXPECT_EQ(floats[4], 1.5f * static_cast<float>(size));
      ranks.all_reduce(std::span<double>());
    });
}

TEST_P(CommunicatorTest, EveryCollectiveDoesWhatItsNameSays) {
  const int64_t size = 3;
  on_ranks(size, [&](Communicator& ranks) {
    const int64_t rank = ranks.rank();
    std::vector<int64_t> send(6), receive(2);
    std::iota(send.begin(), send.end(), 10 * rank);
    const auto collective = [&](Collective::Kind kind, void* into, int64_t count) {
      ranks.run({.kind = kind,
                 .send = send.data(),
                 .receive = into,
                 .count = count,
                 .element = Element::kInt64,
                 .root = 1});
    };
    collective(Collective::Kind::kReduceScatter, receive.data(), 2);
    EXPECT_EQ(receive, (std::vector<int64_t>{30 + 6 * rank, 33 + 6 * rank}));
    std::vector<int64_t> all(6);
    collective(Collective::Kind::kAllGather, all.data(), 2);
    EXPECT_EQ(all, (std::vector<int64_t>{0, 1, 10, 11, 20, 21}));
    collective(Collective::Kind::kAllToAll, all.data(), 2);
    EXPECT_EQ(all, (std::vector<int64_t>{2 * rank, 2 * rank + 1, 10 + 2 * rank, 11 + 2 * rank, 20 + 2 * rank,
                                         21 + 2 * rank}));
    collective(Collective::Kind::kBroadcast, send.data(), 6);
    EXPECT_EQ(send[5], 15);
    EXPECT_EQ(ranks.broadcast(rank == 2 ? std::string(1000, 'x') : "y", 2), std::string(1000, 'x'));
    const auto texts = ranks.all_gather(std::string(static_cast<size_t>(rank), 'a'));
    EXPECT_EQ(texts, (std::vector<std::string>{"", "a", "aa"}));
    ranks.barrier();
  });
}

TEST_P(CommunicatorTest, PartsAreGroupsOfTheirOwn) {
  on_ranks(5, [](Communicator& ranks) {
    const auto part = ranks.split(ranks.rank() % 2);
    EXPECT_EQ(part->size(), ranks.rank() % 2 == 0 ? 3 : 2);
    EXPECT_EQ(part->rank(), ranks.rank() / 2);
    std::vector<double> sum = {static_cast<double>(ranks.rank())};
    part->all_reduce(std::span<double>(sum));
    EXPECT_EQ(sum[0], ranks.rank() % 2 == 0 ? 6 : 4);
    ranks.barrier();
  });
}

TEST_P(CommunicatorTest, WaitsNoLongerThanItsDeadlineForARankThatDoesNotCome) {
  auto ranks = GetParam().make(2);
  ranks[0]->set_deadline(0.05);
  try {
    ranks[0]->barrier();
    ADD_FAILURE() << "the barrier ended";
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("rank 0 of 2"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("barrier"), std::string::npos) << error.what();
  }
  ranks.pop_back();  // the rank that holds the store must end last
}

TEST_P(CommunicatorTest, TwoCollectivesMayBeUnderWay) {
  on_ranks(4, [](Communicator& ranks) {
    std::vector<double> a = {1}, b = {2};
    const auto all_reduce = [](std::vector<double>& values) {
      return Collective{.kind = Collective::Kind::kAllReduce,
                        .send = values.data(),
                        .receive = values.data(),
                        .count = 1,
                        .element = Element::kDouble};
    };
    const auto first = ranks.begin(all_reduce(a)), second = ranks.begin(all_reduce(b));
    while (!second->is_done() || !first->is_done()) std::this_thread::yield();
    EXPECT_EQ(a[0], 4);
    EXPECT_EQ(b[0], 8);
  });
}

TEST_P(CommunicatorTest, MessagesArriveInTurnAndCountTheirBytes) {
  on_ranks(3, [](Communicator& ranks) {
    const int64_t rank = ranks.rank(), size = ranks.size(), count = 5, messages = 4;
    const auto message = [&](Collective::Kind kind, std::vector<int64_t>& values, int64_t other) {
      return Collective{.kind = kind,
                        .send = values.data(),
                        .receive = values.data(),
                        .count = count,
                        .element = Element::kInt64,
                        .root = other};
    };
    std::vector<std::vector<int64_t>> sent;
    std::vector<std::unique_ptr<PendingCollective>> pending;
    const double before = ranks.bytes_sent();
    for (int64_t i = 0; i < messages; ++i) {
      sent.emplace_back(count, 100 * rank + i);
      pending.push_back(ranks.begin(message(Collective::Kind::kSend, sent.back(), (rank + 1) % size)));
    }
    ranks.barrier();  // not a message: a barrier may come between messages
    const int64_t from = (rank + size - 1) % size;
    for (int64_t i = 0; i < messages; ++i) {
      std::vector<int64_t> values(count);
      ranks.run(message(Collective::Kind::kReceive, values, from));
      EXPECT_EQ(values, std::vector<int64_t>(count, 100 * from + i));
    }
    for (size_t i = 0; i < pending.size(); ++i)
      ranks.finish(*pending[i], message(Collective::Kind::kSend, sent[i], (rank + 1) % size));
    EXPECT_EQ(ranks.bytes_sent() - before, static_cast<double>(messages * count * 8));
  });
}

TEST_P(CommunicatorTest, WaitsNoLongerThanItsDeadlineForAMessage) {
  Groups ranks = GetParam().make(2);
  ranks[1]->set_deadline(0.05);
  double value = 0;
  try {
    ranks[1]->run({.kind = Collective::Kind::kReceive,
                   .receive = &value,
                   .count = 1,
                   .element = Element::kDouble,
                   .root = 0});
    FAIL() << "no rank sent a message";
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("receive"), std::string::npos) << error.what();
  }
  ranks.pop_back();  // the rank that holds the store must end last
}

// A text that is longer than one piece of the store, and an empty one.
TEST_P(CommunicatorTest, SendsLongAndEmptyMessages) {
  on_ranks(2, [](Communicator& ranks) {
    const std::string mine(static_cast<size_t>(ranks.rank() == 0 ? 9'000'001 : 0), 'x');
    const auto texts = ranks.all_gather(mine);
    EXPECT_EQ(texts[0], std::string(9'000'001, 'x'));
    EXPECT_EQ(texts[1], "");
    std::vector<double> many(600'000, 1 + static_cast<double>(ranks.rank()));
    ranks.all_reduce(std::span<double>(many));
    EXPECT_EQ(many.front(), 3);
    EXPECT_EQ(many.back(), 3);
    EXPECT_EQ(ranks.await_broadcast(), "");
  });
}

}  // namespace bough
