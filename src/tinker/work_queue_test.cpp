#include "tinker/work_queue.h"

#include <gtest/gtest.h>

#include "tinker/futures.h"

namespace bough {
namespace {

Work batch_work(const std::string& future, const std::string& loss = "cross_entropy",
                bool forward_only = false) {
  auto request = std::make_shared<ForwardBackwardRequest>();
  request->forward_only = forward_only;
  return {.future = future, .request = request, .loss = {.name = loss}, .run = {}};
}
Work other_work(const std::string& future) {
  Work work = run_later([] { return FutureResult{}; });
  work.future = future;
  return work;
}
std::string taken(ModelQueue& queue, int groups = 1) {
  std::string names;
  for (int i = 0; i < groups; ++i)
    for (const Work& work : queue.take().works) names += work.future + " ";
  return names;
}

TEST(ModelQueue, WorksOfAModelRunInTheOrderOfTheirSeqIds) {
  ModelQueue queue;
  queue.add_model("m");
  EXPECT_TRUE(queue.add("m", 3, other_work("c")));
  EXPECT_EQ(taken(queue), "") << "1 and 2 are missing";
  EXPECT_TRUE(queue.add("m", 2, other_work("b")));
  EXPECT_TRUE(queue.add("m", 1, other_work("a")));
  EXPECT_EQ(taken(queue, 4), "a b c ");
  EXPECT_FALSE(queue.add("m", 2, other_work("b"))) << "2 was taken";
  EXPECT_FALSE(queue.add("unknown", 1, other_work("x")));
}

TEST(ModelQueue, ForwardBackwardsThatAreQueuedTogetherAreOneGroup) {
  ModelQueue queue;
  queue.add_model("m");
  queue.add("m", 2, batch_work("b"));
  queue.add("m", 1, batch_work("a"));
  queue.add("m", 4, batch_work("d"));
  queue.add("m", 3, other_work("c"));
  queue.add("m", 5, batch_work("e", "ppo"));
  queue.add("m", 6, batch_work("f", "ppo", true));
  EXPECT_EQ(taken(queue), "a b ");
  EXPECT_EQ(taken(queue), "c ");
  EXPECT_EQ(taken(queue), "d ") << "another loss is another tree";
  EXPECT_EQ(taken(queue), "e ") << "forward_only adds no gradient";
  EXPECT_EQ(taken(queue), "f ");
}

TEST(ModelQueue, SessionsTakeTurns) {
  ModelQueue queue;
  for (const char* future : {"a1", "a2", "a3"}) queue.add_now("a", other_work(future));
  queue.add_now("b", other_work("b1"));
  queue.add_now("", other_work("x1"));
  std::string names;
  while (const auto work = queue.take_now()) names += work->future + " ";
  EXPECT_EQ(names, "a1 b1 x1 a2 a3 ");
}

TEST(ModelQueue, ModelsTakeTurns) {
  ModelQueue queue;
  queue.add_model("m");
  queue.add_model("n");
  for (int64_t i = 1; i <= 2; ++i) {
    queue.add("m", i, other_work("m"));
    queue.add("n", i, other_work("n"));
  }
  EXPECT_EQ(taken(queue, 4), "m n m n ");
  queue.add("m", 3, other_work("late"));
  EXPECT_EQ(queue.remove_model("m").size(), 1U);
  EXPECT_EQ(taken(queue), "");
}

TEST(ModelQueue, AModelThatGoesOnBeginsWhereItWas) {
  ModelQueue queue;
  queue.add_model("m", 3);
  EXPECT_FALSE(queue.add("m", 2, other_work("b")));
  EXPECT_TRUE(queue.add("m", 3, other_work("c")));
  EXPECT_EQ(taken(queue), "c ");
}

TEST(Futures, ARequestThatIsSentAgainHasTheSameFuture) {
  FakeClock clock;
  Futures futures(clock);
  EXPECT_TRUE(futures.add("s", "model/1"));
  EXPECT_FALSE(futures.add("s", "model/1"));
  EXPECT_TRUE(futures.add("s", "model/2"));
  EXPECT_EQ(futures.session_of("model/1"), "s");
  EXPECT_EQ(futures.session_of("model/99"), "");
}

TEST(Futures, WaitersAreAnsweredWhenTheResultComes) {
  FakeClock clock;
  Futures futures(clock);
  const std::string id = "k";
  futures.add("s", id);
  std::vector<int> answers;
  const auto take = [&](int waiter) {
    return [&answers, waiter](const FutureResult& result) {
      EXPECT_EQ(result.json["x"], 1);
      answers.push_back(waiter);
    };
  };
  EXPECT_EQ(futures.wait_for(id, 1, take(1)), Futures::Found::kWaits);
  EXPECT_EQ(futures.wait_for(id, 2, take(2)), Futures::Found::kWaits);
  futures.stop_waiting(id, 1);
  futures.complete(id, {{{"x", 1}}, ""});
  futures.complete(id, {{{"x", 2}}, ""});
  EXPECT_EQ(futures.wait_for(id, 3, take(3)), Futures::Found::kReady);
  EXPECT_EQ(answers, (std::vector<int>{2, 3}));
}

TEST(Futures, AResultIsKeptForTenMinutesAfterItsFirstFetch) {
  FakeClock clock;
  Futures futures(clock);
  const std::string id = "k";
  futures.add("s", id);
  futures.complete(id, {});
  clock.advance(std::chrono::hours(5));
  futures.drop_old();
  const auto nothing = [](const FutureResult&) {};
  EXPECT_EQ(futures.wait_for(id, 1, nothing), Futures::Found::kReady) << "nobody has fetched it yet";
  clock.advance(std::chrono::seconds(599));
  futures.drop_old();
  EXPECT_EQ(futures.wait_for(id, 2, nothing), Futures::Found::kReady);
  clock.advance(std::chrono::seconds(2));
  futures.drop_old();
  EXPECT_EQ(futures.wait_for(id, 3, nothing), Futures::Found::kUnknown);
  EXPECT_EQ(futures.result(id), nullptr);
  EXPECT_TRUE(futures.add("s", "k")) << "a request that comes later is a new one";
}

TEST(Futures, ListWhatASamplingSessionHasCompletedSinceACursor) {
  FakeClock clock;
  std::vector<std::string> told;
  Futures futures(clock, [&](const std::string& key) { told.push_back(key); });
  const std::vector<std::string> ids = {"s:sample:1/0", "s:sample:1/1", "s:sample:1/2",
                                        "s:sample:1/1000000000", "s:sample:11/0"};
  for (const std::string& id : ids) futures.add("s", id);
  uint64_t cursor = 0;
  EXPECT_EQ(futures.completed("s:sample:1", 0, cursor), Json::array());
  for (const size_t i : {2, 3, 4, 0})
    futures.complete(ids[i], i == 0 ? failed_result("no", "user") : FutureResult{});
  EXPECT_EQ(told.back(), "s:sample:1/0");
  const Json first = futures.completed("s:sample:1", 0, cursor);
  ASSERT_EQ(first.size(), 2U);
  EXPECT_EQ(first[0]["request_id"], ids[2]);
  EXPECT_EQ(first[0]["state"], "finished");
  EXPECT_EQ(first[1], (Json{{"request_id", ids[0]}, {"state", "failed"}}));
  EXPECT_EQ(futures.completed("s:sample:1", 0, cursor), Json::array());
  futures.complete(ids[1], {});
  EXPECT_EQ(futures.completed("s:sample:1", 0, cursor)[0]["request_id"], ids[1]);
  cursor = 0;
  EXPECT_EQ(futures.completed("s:sample:1", 1, cursor)[0]["request_id"], ids[3]);
}

TEST(Futures, CountWhatWasNotFetchedAndDropWhatWas) {
  FakeClock clock;
  Futures futures(clock);
  const std::string done = "k", pending = "l";
  futures.add("s", done);
  futures.add("s", pending);
  futures.add("t", "m");
  futures.complete(done, {});
  EXPECT_EQ(futures.num_unfetched({"s"}), 2);
  EXPECT_EQ(futures.num_unfetched({"s", "t"}), 3);
  futures.drop("s", {done, pending});
  EXPECT_EQ(futures.num_unfetched({"s"}), 2) << "nobody has fetched them";
  const auto nothing = [](const FutureResult&) {};
  EXPECT_EQ(futures.wait_for(done, 1, nothing), Futures::Found::kReady);
  EXPECT_EQ(futures.num_unfetched({"s"}), 1);
  futures.drop("t", {done});
  EXPECT_EQ(futures.session_of(done), "s");
  futures.drop("s", {done});
  EXPECT_EQ(futures.session_of(done), "");
  futures.abandon(pending);
  EXPECT_EQ(futures.num_unfetched({"s"}), 0);
}

TEST(Futures, EndWithTheirSession) {
  FakeClock clock;
  Futures futures(clock);
  const std::string id = "k", other = "l";
  futures.add("s", id);
  futures.add("t", other);
  futures.drop_session("s");
  const auto nothing = [](const FutureResult&) {};
  EXPECT_EQ(futures.wait_for(id, 1, nothing), Futures::Found::kUnknown);
  EXPECT_EQ(futures.wait_for(other, 2, nothing), Futures::Found::kWaits);
  futures.complete(id, {});  // its computation ends later
}

}  // namespace
}  // namespace bough
