#include "algo/filters.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <random>

#include "base/error.h"

namespace bough {
namespace {

using Bits = std::vector<uint8_t>;

// Group 1 has unequal rewards and one truncated sample. Group 2 has equal rewards. Group 3 has two samples,
// one of them truncated. Group 4 is a single sample.
const std::vector<int64_t> kGroups{1, 2, 1, 3, 2, 1, 3, 4};
const std::vector<double> kRewards{1, 5, 0, 1, 5, 1, 0, 2};
const Bits kTruncated{0, 0, 1, 0, 0, 0, 1, 0};

FilterResult filter(bool dynamic_sampling, const char* truncated_samples) {
  return filter_sequences({dynamic_sampling, truncated_samples}, {kRewards, kGroups, kTruncated});
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

TEST(Filters, MaskKeepsTruncatedSamplesInTheGroup) {
  const FilterResult result = filter(false, "mask");
  EXPECT_EQ(result.kept, Bits(8, 1));
  EXPECT_EQ(result.trained, (Bits{1, 1, 0, 1, 1, 1, 0, 1}));
  EXPECT_EQ(result.truncated_masked, 2);
  EXPECT_EQ(result.truncated_dropped, 0);
  EXPECT_EQ(result.sequences_dropped, 0);
}

TEST(Filters, DropRemovesAGroupWithOneSampleLeft) {
  // Without the truncated samples, group 1 has equal rewards, too. Group 3 has one sample left, which is
  // dropped, too.
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
        filter_sequences({round % 2 == 0, how[round % 3]}, {rewards, groups, truncated});
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

TEST(Filters, KeepsTheSamplesWithTheHighestRewardsOfAGroup) {
  FilterSettings settings;
  settings.keep_samples = 2;
  const std::vector<int64_t> groups{1, 1, 1, 1, 2, 1};
  const std::vector<double> rewards{0, 3, 1, 3, 7, 3};
  const Bits none(6, 0);
  const FilterResult result = filter_sequences(settings, {rewards, groups, none});
  EXPECT_EQ(result.kept, (Bits{0, 1, 0, 1, 1, 0})) << "among equal rewards, the earlier samples are kept";
  EXPECT_EQ(result.surplus_dropped, 3);
  EXPECT_EQ(result.sequences_dropped, 3);
  EXPECT_EQ(result.zero_std_groups, 1) << "the kept samples have equal rewards";
  const Bits valid{1, 0, 1, 1, 1, 1};
  EXPECT_EQ(filter_sequences(settings, {rewards, groups, none, valid}).kept, (Bits{0, 0, 0, 1, 1, 1}));
}

// Checks equation 4 by trying every subset: the n = keep_samples kept samples of a group have the largest
// possible sum of rewards (or acceptance). For each width of by_width, the same holds among the first `width`
// samples of a group.
TEST(Filters, OversamplingIsEquationFour) {
  std::mt19937_64 bits(2);
  constexpr int64_t kGroupCount = 3;
  for (int round = 0; round < 20; ++round) {
    FilterSettings settings;
    settings.keep_samples = 4;
    const bool by_acceptance = round % 2 == 1;
    settings.keep_samples_by = by_acceptance ? "acceptance" : "reward";
    constexpr size_t kWidth = 12;
    std::vector<int64_t> groups;
    std::vector<double> rewards, acceptance;
    for (size_t s = 0; s < kWidth * kGroupCount; ++s) {
      groups.push_back(static_cast<int64_t>(s) % kGroupCount);
      rewards.push_back(static_cast<double>(bits() % 5));
      acceptance.push_back(static_cast<double>(bits() % 1000) / 1000);
    }
    const Bits none(groups.size(), 0);
    const FilterInput input{rewards, groups, none, {}, {}, acceptance};
    const FilterResult result = filter_sequences(settings, input);
    const std::vector<double>& score = by_acceptance ? acceptance : rewards;
    // The largest sum of scores of keep_samples (4) samples among the first `width` samples of a group.
    const auto best = [&](int64_t group, int64_t width) {
      double most = -1;
      for (uint32_t set = 0; set < (1u << width); ++set) {
        if (std::popcount(set) != 4) continue;
        double sum = 0;
        for (int64_t i = 0; i < width; ++i)
          if (set >> i & 1) sum += score[static_cast<size_t>(group + i * kGroupCount)];
        most = std::max(most, sum);
      }
      return most;
    };
    for (int64_t group = 0; group < kGroupCount; ++group) {
      double sum = 0;
      int64_t count = 0;
      for (size_t s = 0; s < groups.size(); ++s) {
        if (groups[s] != group || !result.kept[s]) continue;
        sum += score[s];
        ++count;
      }
      ASSERT_EQ(count, 4);
      ASSERT_NEAR(sum, best(group, kWidth), 1e-12);
    }
    ASSERT_EQ(result.by_width.size(), 4u);
    const std::vector<int64_t> widths = {4, 6, 8, 12};
    for (size_t i = 0; i < widths.size(); ++i) {
      double expected = 0;
      for (int64_t group = 0; group < kGroupCount; ++group) expected += best(group, widths[i]);
      const KeptByWidth& kept = result.by_width[i];
      ASSERT_EQ(kept.width, widths[i]);
      ASSERT_NEAR(by_acceptance ? *kept.acceptance : kept.reward, expected / (4 * kGroupCount), 1e-12);
    }
  }
}

TEST(Filters, KeepingByAcceptanceNeedsAcceptanceAndKeepSamples) {
  FilterSettings settings;
  settings.keep_samples_by = "acceptance";
  EXPECT_THROW(settings.check(), UserError);
  settings.keep_samples = 1;
  EXPECT_NO_THROW(settings.check());
  EXPECT_ANY_THROW(filter_sequences(settings, {kRewards, kGroups, kTruncated}));
  settings.dynamic_sampling = true;
  EXPECT_THROW(settings.check(), UserError);
  settings.keep_samples_by = "luck";
  EXPECT_THROW(filter_sequences(settings, {kRewards, kGroups, kTruncated}), UserError);
}

TEST(Filters, UnknownValueIsAnError) {
  EXPECT_THROW(filter(false, "remove"), UserError);
}

}  // namespace
}  // namespace bough
