#include "algo/advantages.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "algo/advantages/gae.h"
#include "algo/reward_shaping.h"
#include "base/error.h"

namespace bough {
namespace {

template <class F>
std::string user_error(const F& call) {
  try {
    call();
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

// Advantages of an estimator that gives one value per sequence.
std::vector<double> advantages(const AdvantageSettings& settings, std::vector<double> rewards,
                               std::vector<int64_t> groups, std::vector<int64_t> tokens = {}) {
  std::vector<double> out;
  for (const auto& list : compute_advantages(settings, {rewards, groups, tokens})) {
    EXPECT_EQ(list.size(), 1u);
    out.push_back(list.at(0));
  }
  return out;
}

// The published equations, evaluated sequence by sequence.
double reference(const AdvantageSettings& settings, const std::vector<double>& rewards,
                 const std::vector<int64_t>& groups, size_t i) {
  double sum = 0, squares = 0, n = 0;
  for (size_t j = 0; j < rewards.size(); ++j) {
    if (groups[j] != groups[i]) continue;
    sum += rewards[j], squares += rewards[j] * rewards[j], n += 1;
  }
  const double mean = sum / n;
  if (settings.adv_estimator == "dr_grpo") return rewards[i] - mean;
  if (settings.adv_estimator == "rloo") return rewards[i] - (sum - rewards[i]) / (n - 1);
  const double variance = (squares - n * mean * mean) / (settings.std_unbiased ? n - 1 : n);
  return (rewards[i] - mean) / (std::sqrt(variance) + settings.eps);
}

TEST(Advantages, EqualTheReferenceOnInterleavedGroups) {
  std::mt19937_64 bits(1);
  std::normal_distribution<double> normal;
  std::vector<double> rewards;
  std::vector<int64_t> groups;
  for (int s = 0; s < 120; ++s) {
    rewards.push_back(normal(bits));
    groups.push_back(s < 20 ? s % 10 : static_cast<int64_t>(bits() % 10));  // two or more per group
  }
  for (const AdvantageSettings& settings : {AdvantageSettings{"grpo"}, AdvantageSettings{"grpo", false, 0.01},
                                            AdvantageSettings{"dr_grpo"}, AdvantageSettings{"rloo"}}) {
    const std::vector<double> got = advantages(settings, rewards, groups);
    ASSERT_EQ(got.size(), rewards.size());
    for (size_t i = 0; i < rewards.size(); ++i)
      EXPECT_NEAR(got[i], reference(settings, rewards, groups, i), 1e-11)
          << settings.adv_estimator << " " << i;
  }
}

TEST(Advantages, HandValues) {
  // Rewards 1, 0, 0, 1: mean 0.5, unbiased variance 1/3.
  const std::vector<double> got = advantages({"grpo"}, {1, 0, 0, 1}, {4, 4, 4, 4});
  EXPECT_NEAR(got[0], 0.5 / (std::sqrt(1.0 / 3.0) + 1e-6), 1e-15);
  EXPECT_NEAR(got[1], -got[0], 1e-15);
  EXPECT_NEAR(advantages({"grpo", false, 0.0}, {1, 0, 0, 1}, {4, 4, 4, 4})[0], 1.0, 1e-15);
  EXPECT_NEAR(advantages({"rloo"}, {1, 0, 0}, {4, 4, 4})[1], -0.5, 1e-15);
}

TEST(Advantages, GroupsOfOneAndEqualRewards) {
  EXPECT_EQ(advantages({"grpo", true, 0.5}, {3.0}, {0}), std::vector<double>{2.0});
  EXPECT_EQ(advantages({"dr_grpo"}, {3.0}, {0}), std::vector<double>{0.0});
  // The mean of seven values 0.1 is rounded. The advantages must still be exactly 0.
  EXPECT_EQ(advantages({"grpo", true, 1e-6}, std::vector<double>(7, 0.1), std::vector<int64_t>(7, 2)),
            std::vector<double>(7, 0.0));
  EXPECT_TRUE(advantages({"grpo"}, {}, {}).empty());
  EXPECT_NE(user_error([] {
              advantages({"rloo"}, {1, 2, 3}, {0, 0, 1});
            }).find("n_samples"),
            std::string::npos);
}

TEST(Advantages, BadInputIsNamed) {
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    const std::string message = user_error([&] { advantages({"grpo"}, {1.0, bad}, {0, 0}); });
    EXPECT_NE(message.find("sequence 1"), std::string::npos) << message;
    EXPECT_NE(user_error([&] {
                shape_rewards({}, std::vector<double>{0.0, 0.0, bad});
              }).find("sequence 2"),
              std::string::npos);
  }
  EXPECT_NE(user_error([] { advantages({"grop"}, {1.0}, {0}); }).find("did you mean 'grpo'"),
            std::string::npos);
  EXPECT_THROW(advantages({"grpo"}, {1.0}, {}), InternalError);
}

TEST(Advantages, LevelsOfMeanAndDeviation) {
  // The groups have rewards 1, 3 and 5, 9: means 2 and 7, deviations sqrt(2) and sqrt(8). The batch's mean is
  // 4.5.
  const std::vector<double> rewards{1, 3, 5, 9};
  const std::vector<int64_t> groups{0, 0, 1, 1};
  const auto at = [&](const char* mean_level, const char* std_level, size_t i) {
    AdvantageSettings settings{"grpo", true, 0.0, mean_level, std_level};
    return advantages(settings, rewards, groups)[i];
  };
  const double batch_std = std::sqrt((12.25 + 2.25 + 0.25 + 20.25) / 3);
  EXPECT_NEAR(at("group", "group", 3), 2 / std::sqrt(8.0), 1e-15);
  EXPECT_NEAR(at("auto", "batch", 3), 2 / batch_std, 1e-15);
  EXPECT_NEAR(at("batch", "batch", 0), -3.5 / batch_std, 1e-15);
  EXPECT_NEAR(at("batch", "group", 0), -3.5 / std::sqrt(2.0), 1e-15);
  EXPECT_EQ(at("none", "none", 2), 5);
  EXPECT_EQ(at("group", "none", 2), -2);
  EXPECT_EQ(advantages({"grpo", true, 0.0, "batch", "group"}, {1, 1, 0}, {0, 0, 1})[0], 1 - 2.0 / 3)
      << "a deviation of 0 counts as 1";
  EXPECT_NE(user_error([] {
              advantages({.adv_estimator = "rloo", .mean_level = "batch"}, {1, 2}, {0, 0});
            }).find("mean_level"),
            std::string::npos);
}

// The values come from AReaL's test_ppo_gae.py.
TEST(Gae, ATurnIsOneStepAndUntrainedTokensAreNone) {
  const std::vector<double> rewards{0, 3, 0, 0, 4}, values{1, 5, 9, 2, 8};
  const std::vector<uint8_t> trained{1, 1, 0, 1, 1};
  const std::vector<int32_t> turns{0, 0, -1, 2, 2};
  const GaeResult got = gae({rewards, values, trained, turns, true}, 0.5, 0.25);
  EXPECT_EQ(got.advantages, (std::vector<double>{3.75, 3.75, 0, 6, 6}));
  EXPECT_EQ(got.returns, (std::vector<double>{4.75, 4.75, 9, 8, 8}));
  const std::vector<double> late{0, 1, 0, 2}, zeros(4, 0.0);
  const std::vector<uint8_t> all(4, 1);
  const std::vector<int32_t> two{0, 0, 1, 1};
  EXPECT_EQ(gae({late, zeros, all, two}, 1, 0.5).advantages, (std::vector<double>{2, 2, 2, 2}));
  EXPECT_EQ(gae({late, zeros, all, two}, 1, 0).advantages, (std::vector<double>{1, 1, 2, 2}));
  EXPECT_TRUE(gae({}, 1, 1).advantages.empty());
}

AdvantageSettings without_norm(const char* estimator) {
  AdvantageSettings settings{.adv_estimator = estimator};
  settings.adv_norm = {"none", "none"};
  return settings;
}

TEST(Gae, EstimatorWhitensAdvantagesAndNotReturns) {
  const std::vector<double> rewards{1, 0, 0};
  const std::vector<int64_t> groups{0, 0, 1}, tokens{2, 1, 0};
  const AdvantageInput batch{.rewards = rewards,
                             .groups = groups,
                             .tokens = tokens,
                             .steps = {{{0, 1}, {0.5, 0.25}, {0, 0}, false}, {{0}, {2}, {0}, true}, {}}};
  AdvantageSettings settings = without_norm("gae");
  settings.discount = 0.5;
  settings.gae_lambda = 0.5;
  settings.bootstrap_truncated = true;
  std::vector<std::vector<double>> returns;
  // The first sample's deltas are 0.5 · 0.25 - 0.5 and 1 - 0.25. The truncated sample's delta is 0.5 · 2 - 2.
  // The last sample has no token.
  const std::vector<std::vector<double>> expected{{-0.375 + 0.25 * 0.75, 0.75}, {-1}, {}};
  EXPECT_EQ(compute_advantages(settings, batch, &returns), expected);
  EXPECT_EQ(returns, (std::vector<std::vector<double>>{{0.3125, 1}, {1}, {}}));
  settings.bootstrap_truncated = false;
  EXPECT_EQ(compute_advantages(settings, batch)[1], std::vector<double>{-2});

  settings.bootstrap_truncated = true;
  settings.adv_norm = {};
  returns.clear();
  const double mean = (-0.1875 + 0.75 - 1) / 3;
  double squares = 0;
  for (const double a : {-0.1875, 0.75, -1.0}) squares += (a - mean) * (a - mean);
  const auto whitened = compute_advantages(settings, batch, &returns);
  EXPECT_NEAR(whitened[0][1], (0.75 - mean) / std::sqrt(squares / 2 + 1e-8), 1e-12);
  EXPECT_EQ(returns[0], (std::vector<double>{0.3125, 1}));
  settings.adv_norm = {"none", "batch"};
  EXPECT_NEAR(compute_advantages(settings, batch)[0][1], 0.75 / std::sqrt(squares / 2 + 1e-8), 1e-12);
  settings.adv_norm = {"batch", "none"};
  EXPECT_NEAR(compute_advantages(settings, batch)[0][1], 0.75 - mean, 1e-12);
  AdvantageInput wild = batch;
  wild.steps[0].values[1] = NAN;
  EXPECT_NE(user_error([&] { compute_advantages(settings, wild); }).find("sequence 1"), std::string::npos);
  EXPECT_NE(user_error([] {
              AdvantageSettings{.adv_norm = {"none", "auto"}}.check();
            }).find("adv_norm"),
            std::string::npos);
}

TEST(TurnReturns, EachTurnGetsTheDiscountedRewardsFromItOn) {
  const std::vector<double> rewards{3, 5};
  const std::vector<int64_t> groups{0, 0}, tokens{5, 1};
  const AdvantageInput batch{.rewards = rewards,
                             .groups = groups,
                             .tokens = tokens,
                             .steps = {{{1, 0, 0, 0, 2}, {}, {0, 1, 1, 1, 2}, true}, {{5}, {}, {0}, false}}};
  AdvantageSettings settings = without_norm("turn_returns");
  settings.turn_discount = 0.5;
  EXPECT_EQ(compute_advantages(settings, batch), (std::vector<std::vector<double>>{{1.5, 1, 1, 1, 2}, {5}}));
  settings.adv_norm = {};
  EXPECT_EQ(compute_advantages(settings, batch)[1][0], 5) << "without adv_norm, returns are not normalized";
}

TEST(Advantages, SettingsAreReadByTheirKeys) {
  EXPECT_EQ(parse_settings<AdvantageSettings>("adv_estimator: rloo", "test").adv_estimator, "rloo");
  EXPECT_THROW(parse_settings<AdvantageSettings>("adv_estimator: gea", "test"), UserError);
  EXPECT_EQ(
      parse_settings<RewardShapingSettings>("{reward_scaling: 10, reward_bias: -0.5}", "test").reward_bias,
      -0.5);
}

TEST(Rewards, BiasThenScaleThenClip) {
  RewardShapingSettings settings;
  settings.reward_bias = -0.5;
  settings.reward_scaling = 10.0;
  const std::vector<double> raw{1.0, 0.0, 100.0, -100.0};
  EXPECT_EQ(shape_rewards(settings, raw), (std::vector<double>{5.0, -5.0, 20.0, -20.0}));
}

TEST(Rewards, OverlongPenaltyIsLinearInTheCache) {
  EXPECT_EQ(overlong_penalty(80, 100, 20), 0.0);
  EXPECT_EQ(overlong_penalty(81, 100, 20), -0.05);
  EXPECT_EQ(overlong_penalty(95, 100, 20), -0.75);
  EXPECT_EQ(overlong_penalty(100, 100, 20), -1.0);
  EXPECT_EQ(overlong_penalty(130, 100, 20), -1.0);
  EXPECT_EQ(overlong_penalty(100, 100, 0), 0.0);
  EXPECT_EQ(overlong_penalty(101, 100, 0), -1.0);

  RewardShapingSettings settings;
  settings.overlong_reward_penalty = true;
  settings.overlong_tokens = 20;
  settings.overlong_penalty_factor = 2.0;
  settings.reward_bias = 1.0;
  const std::vector<double> raw{1.0, 1.0};
  const std::vector<int64_t> lengths{50, 90};
  EXPECT_EQ(shape_rewards(settings, raw, lengths, 100), (std::vector<double>{2.0, 1.0}));
  EXPECT_THROW(shape_rewards(settings, raw, lengths, 10), UserError);
  EXPECT_THROW(shape_rewards(settings, raw, {}, 100), InternalError);
}

}  // namespace
}  // namespace bough
