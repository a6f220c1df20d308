#include "base/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string_view>

namespace bough {
namespace {

using Block = std::array<uint32_t, 4>;

// Expected values of the authors' implementation (Random123, kat_vectors: philox4x32, 10 rounds).
TEST(Random, PhiloxKnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Random, EveryPartOfTheNameMatters) {
  std::set<uint64_t> seen;
  for (uint64_t seed : {0ull, 1ull, 1ull << 40})
    for (const Purpose purpose : {Purpose::sample, Purpose::shuffle})
      for (uint64_t sequence : {0ull, 1ull, 1ull << 40})
        for (uint64_t position : {0ull, 1ull, 1ull << 40})
          seen.insert(CounterRandom(seed, purpose).bits(sequence, position));
  EXPECT_EQ(seen.size(), 54u);
  EXPECT_EQ(CounterRandom(5, Purpose::init).bits(3, 4), CounterRandom(5, Purpose::init).bits(3, 4));
}

TEST(Random, UniformAndNormalHaveTheirMoments) {
  const CounterRandom random(1, Purpose::test);
  const int n = 200'000;
  double sum = 0, squares = 0, normal_sum = 0, normal_squares = 0, fourth = 0;
  for (int i = 0; i < n; ++i) {
    const double u = random.uniform(1, static_cast<uint64_t>(i)),
                 z = random.normal(2, static_cast<uint64_t>(i));
    ASSERT_GT(u, 0.0);
    ASSERT_LT(u, 1.0);
    sum += u, squares += u * u, normal_sum += z, normal_squares += z * z, fourth += z * z * z * z;
  }
  // The tolerance is five standard errors of each mean: sd(u) = 0.289, sd(u^2) = 0.298, sd(z) = 1, sd(z^2) =
  // 1.41, sd(z^4) = 9.8.
  const double error = 5 / std::sqrt(n);
  EXPECT_NEAR(sum / n, 0.5, 0.289 * error);
  EXPECT_NEAR(squares / n, 1.0 / 3, 0.298 * error);
  EXPECT_NEAR(normal_sum / n, 0, error);
  EXPECT_NEAR(normal_squares / n, 1, 1.42 * error);
  EXPECT_NEAR(fourth / n, 3, 9.8 * error);
}

TEST(Random, BelowIsUnbiased) {
  const CounterRandom random(2, Purpose::test);
  // n = 3/4 of 2^64. Without rejection, half of the results would be divisible by 3 instead of a third.
  const uint64_t n = 3ull << 62;
  int divisible = 0;
  std::array<int, 5> counts = {};
  const int draws = 50'000;
  for (uint64_t i = 0; i < draws; ++i) {
    const uint64_t value = random.below(n, 0, i);
    ASSERT_LT(value, n);
    divisible += value % 3 == 0;
    ++counts[random.below(5, 1, i)];
  }
  EXPECT_NEAR(divisible, draws / 3.0, 5 * std::sqrt(draws * 2.0 / 9));
  for (const int count : counts) EXPECT_NEAR(count, draws / 5, 5 * std::sqrt(draws * 0.16));
  EXPECT_EQ(random.below(1, 3, 3), 0u);
}

TEST(Random, PermutationHoldsEveryIndexOnce) {
  const CounterRandom random(3, Purpose::shuffle);
  const auto order = random.permutation(1000, 7);
  EXPECT_EQ(std::set<size_t>(order.begin(), order.end()).size(), 1000u);
  EXPECT_EQ(*std::max_element(order.begin(), order.end()), 999u);
  EXPECT_NE(order, random.permutation(1000, 8));
  EXPECT_TRUE(random.permutation(0, 0).empty());
  std::array<int, 3> first = {};
  for (uint64_t i = 0; i < 9000; ++i) ++first[random.permutation(3, i)[0]];
  for (const int count : first) EXPECT_NEAR(count, 3000, 5 * std::sqrt(9000 * 2.0 / 9));
}

TEST(Random, HashesAreStable) {
  const auto hash = [](std::string_view text) { return stable_hash(text.data(), text.size()); };
  EXPECT_EQ(hash("abc"), hash("abc"));
  EXPECT_NE(hash("abc"), hash("abd"));
  EXPECT_NE(hash(""), hash(std::string_view("\0", 1)));
}

}  // namespace
}  // namespace bough
