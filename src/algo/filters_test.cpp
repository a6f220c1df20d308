#include "algo/filters.h"

#include <gtest/gtest.h>

#include <random>

#include "base/error.h"

namespace bough {
namespace {

using Bits = std::vector<uint8_t>;

// Group 1: unequal, one truncated. Group 2: equal. Group 3: one of two truncated. Group 4: a single sample.
const std::vector<int64_t> kGroups{1, 2, 1, 3, 2, 1, 3, 4};
const std::vector<double> kRewards{1, 5, 0, 1, 5, 1, 0, 2};
const Bits kTruncated{0, 0, 1, 0, 0, 0, 1, 0};

FilterResult filter(bool dynamic_sampling, const char* truncated_samples) {
  return filter_sequences({dynamic_sampling, truncated_samples}, kRewards, kGroups, kTruncated);
}

TEST(Filters, KeepCountsButDropsNothing) {
  const FilterResult result = filter(false, "keep");
  EXPECT_EQ(result.kept, Bits(8, 1));
  EXPECT_EQ(result.trained, Bits(8, 1));
  EXPECT_EQ(result.truncated, 2);
  EXPECT_EQ(result.zero_std_groups, 1);
  EXPECT_EQ(result.groups_dropped, 0);
  EXPECT_EQ(result.sequences_dropped, 0);
}

TEST(Filters, DynamicSamplingDropsEqualGroups) {
  const FilterResult result = filter(true, "keep");
  EXPECT_EQ(result.kept, (Bits{1, 0, 1, 1, 0, 1, 1, 1}));
  EXPECT_EQ(result.zero_std_groups, 1);
  EXPECT_EQ(result.groups_dropped, 1);
  EXPECT_EQ(result.sequences_dropped, 2);
}

TEST(Filters, MaskKeepsThemInTheGroup) {
  const FilterResult result = filter(false, "mask");
  EXPECT_EQ(result.kept, Bits(8, 1));
  EXPECT_EQ(result.trained, (Bits{1, 1, 0, 1, 1, 1, 0, 1}));
  EXPECT_EQ(result.truncated_masked, 2);
  EXPECT_EQ(result.truncated_dropped, 0);
  EXPECT_EQ(result.sequences_dropped, 0);
}

TEST(Filters, DropTakesALonelySampleAlong) {
  // Without its truncated sample group 1 is equal too; group 3 has one sample left, dropped with it.
  const FilterResult result = filter(false, "drop");
  EXPECT_EQ(result.kept, (Bits{1, 1, 0, 0, 1, 1, 0, 1}));
  EXPECT_EQ(result.trained, result.kept);
  EXPECT_EQ(result.truncated_dropped, 2);
  EXPECT_EQ(result.zero_std_groups, 2);
  EXPECT_EQ(result.groups_dropped, 1);
  EXPECT_EQ(result.sequences_dropped, 3);
  EXPECT_EQ(filter(true, "drop").kept, (Bits{0, 0, 0, 0, 0, 0, 0, 1}));
}

TEST(Filters, CountsAddUp) {
  std::mt19937_64 bits(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<int64_t> groups;
    std::vector<double> rewards;
    Bits truncated;
    for (uint64_t s = 0, n = bits() % 20; s < n; ++s) {
      groups.push_back(static_cast<int64_t>(bits() % 5));
      rewards.push_back(static_cast<double>(bits() % 2));
      truncated.push_back(bits() % 4 == 0);
    }
    const char* how[] = {"keep", "mask", "drop"};
    const FilterResult result =
        filter_sequences({round % 2 == 0, how[round % 3]}, rewards, groups, truncated);
    int64_t not_kept = 0, only_masked = 0;
    for (size_t s = 0; s < groups.size(); ++s) {
      not_kept += !result.kept[s];
      only_masked += result.kept[s] && !result.trained[s];
      ASSERT_LE(result.trained[s], result.kept[s]);
    }
    ASSERT_EQ(not_kept, result.sequences_dropped);
    ASSERT_EQ(only_masked, result.truncated_masked);
  }
}

TEST(Filters, OfAGroupTheSamplesOfHighestRewardAreKept) {
  FilterSettings settings;
  settings.keep_samples = 2;
  const std::vector<int64_t> groups{1, 1, 1, 1, 2, 1};
  const std::vector<double> rewards{0, 3, 1, 3, 7, 3};
  const FilterResult result = filter_sequences(settings, rewards, groups, Bits(6, 0), {});
  EXPECT_EQ(result.kept, (Bits{0, 1, 0, 1, 1, 0})) << "of equal rewards the earlier ones";
  EXPECT_EQ(result.surplus_dropped, 3);
  EXPECT_EQ(result.sequences_dropped, 3);
  EXPECT_EQ(result.zero_std_groups, 1) << "those that are kept";
  const Bits valid{1, 0, 1, 1, 1, 1};
  EXPECT_EQ(filter_sequences(settings, rewards, groups, Bits(6, 0), valid).kept, (Bits{0, 0, 0, 1, 1, 1}));
}

TEST(Filters, UnknownValueIsAnError) {
  EXPECT_THROW(filter(false, "remove"), UserError);
}

}  // namespace
}  // namespace bough
