#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <stdexcept>

namespace bough {
namespace {

TEST(ThreadPool, FuturesCarryResultsAndExceptions) {
  ThreadPool pool(3);
  std::vector<std::future<int>> futures;
  for (int i = 0; i < 100; ++i) futures.push_back(pool.submit([i] { return i * i; }));
  for (int i = 0; i < 100; ++i) EXPECT_EQ(futures[static_cast<size_t>(i)].get(), i * i);
  auto failing = pool.submit([]() -> int { throw std::runtime_error("no"); });
  EXPECT_THROW(failing.get(), std::runtime_error);
  EXPECT_EQ(pool.submit([] { return 7; }).get(), 7);
}

TEST(ThreadPool, TheDestructorRunsWhatIsQueued) {
  std::atomic<int> done{0};
  {
    ThreadPool pool(1);
    for (int i = 0; i < 50; ++i) pool.submit([&] { ++done; });
  }
  EXPECT_EQ(done, 50);
}

TEST(ThreadPool, ParallelForVisitsEveryIndexOnce) {
  ThreadPool pool(4);
  for (const int64_t n : {0, 1, 2, 1000}) {
    std::vector<std::atomic<int>> visits(static_cast<size_t>(n));
    pool.parallel_for(10, 10 + n, [&](int64_t i) { ++visits[static_cast<size_t>(i - 10)]; });
    for (const auto& count : visits) EXPECT_EQ(count, 1);
  }
}

TEST(ThreadPool, ParallelForThrowsTheFirstErrorAfterAllEnded) {
  ThreadPool pool(2);
  std::atomic<int> inside{0};
  try {
    pool.parallel_for(0, 100, [&](int64_t i) {
      ++inside;
      if (i == 3) {
        --inside;
        throw std::runtime_error("three");
      }
      std::this_thread::yield();
      --inside;
    });
    FAIL() << "nothing thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "three");
  }
  EXPECT_EQ(inside, 0);
}

TEST(ThreadPool, ParallelForInsideATaskOfAFullPool) {
  ThreadPool pool(1);
  std::atomic<int64_t> sum{0};
  pool.submit([&] { pool.parallel_for(0, 10, [&](int64_t i) { sum += i; }); }).get();
  EXPECT_EQ(sum, 45);
}

}  // namespace
}  // namespace bough
