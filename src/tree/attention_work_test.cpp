#include "tree/attention_work.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace bough {
namespace {

using Kind = DeviceProfile::Attention;

int64_t pad(int64_t rows) {
  return rows <= 32 ? 32 : rows <= 64 ? 64 : 128;
}

// The kernel's loops, task by task, for one path over a stack: what each thread computes, the most of it.
double busiest_forward(int64_t threads, int64_t queries, int64_t stack, int64_t groups) {
  const int64_t tile = queries * groups >= 128 * threads ? 128 : 32;
  std::vector<double> tasks;
  for (int64_t first = 0; first < queries; first += tile)
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t last = std::min(queries, first + tile);
      double keys = 0;
      for (const auto& [begin, end] : {std::pair(int64_t{0}, stack), std::pair(int64_t{0}, last)})
        for (int64_t k = begin; k < end; k += 128)
          keys += static_cast<double>(pad(std::min<int64_t>(128, end - k)));
      tasks.push_back(static_cast<double>(pad(last - first)) * keys);
    }
  const auto share = (static_cast<int64_t>(tasks.size()) + threads - 1) / threads;
  double most = 0;
  for (int64_t begin = 0; begin < static_cast<int64_t>(tasks.size()); begin += share) {
    double sum = 0;
    for (int64_t i = begin; i < std::min<int64_t>(begin + share, tasks.size()); ++i) sum += tasks[i];
    most = std::max(most, sum);
  }
  return most * static_cast<double>(threads) / static_cast<double>(groups);
}

TEST(AttentionWork, ForwardIsThatOfTheBusiestThread) {
  for (const int64_t threads : {1, 2, 3, 8, 64})
    for (const int64_t groups : {1, 2, 4, 8})
      for (const int64_t queries : {1, 16, 31, 64, 99, 128, 130, 256, 500, 2048})
        for (const int64_t stack : {0, 1, 100, 1000})
          EXPECT_DOUBLE_EQ(
              attention_work(Kind::kTiles, threads,
                             {queries, static_cast<double>(stack), (queries + 1) / 2.0, 1, groups}, false),
              busiest_forward(threads, queries, stack, groups))
              << threads << " threads, " << groups << " groups, " << queries << " queries, stack " << stack;
}

TEST(AttentionWork, ALittleMoreThanATileCostsASecondThreadsWholeTile) {
  const auto work = [](int64_t queries) {
    return attention_work(Kind::kTiles, 2, {queries, 0, (queries + 1) / 2.0, 1, 4}, false);
  };
  EXPECT_EQ(work(128), 128 * 128);
  EXPECT_EQ(work(130), 2 * 128 * 128);
}

TEST(AttentionWork, BackwardSharesKeysAmongThreads) {
  const auto work = [](int64_t threads, int64_t groups) {
    return attention_work(Kind::kTiles, threads, {256, 1024, 128.5, 1, groups}, true);
  };
  const double even = 128 * (128 + 1024) + 128 * (256 + 1024);
  EXPECT_EQ(work(1, 4), even);
  EXPECT_EQ(work(2, 4), even);
  EXPECT_EQ(work(2, 1), even);          // two shares of the keys
  EXPECT_EQ(work(2, 3), even * 4 / 3);  // three tasks for two threads
}

TEST(AttentionWork, PiecesSeeLessThanAPathAndMoreThanTheirPairs) {
  const AttentionPass path{2048, 0, 1024.5, 1, 4}, pieces{2048, 0, 25.5, 41, 4};
  for (const bool backward : {false, true}) {
    const double work = attention_work(Kind::kTiles, 2, pieces, backward);
    EXPECT_LT(work, attention_work(Kind::kTiles, 2, path, backward) / 4);
    EXPECT_GT(work, 2048 * 25.5);
  }
}

TEST(AttentionWork, ReferenceAndFused) {
  EXPECT_EQ(attention_work(Kind::kReference, 2, {10, 5, 5.5, 1, 4}, true), 10 * 15);
  EXPECT_EQ(attention_work(Kind::kFused, 1, {10, 5, 5.5, 1, 4}, true), 10 * (5 + 5.5 + 64));
  EXPECT_EQ(attention_work(Kind::kTiles, 2, {}, true), 0);
  EXPECT_EQ(attention_rows(Kind::kTiles, 130), 160);
  EXPECT_EQ(attention_rows(Kind::kFused, 130), 130);
}

}  // namespace
}  // namespace bough
