#include "env/reward.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace bough {
namespace {

TEST(VerifierReward, ScoresAgainstTheGold) {
  const Problem four{"a", "2+2", {}, "2+2=4 #### 4"};
  const Problem word{"b", "capital of France", {}, "Paris"};
  RewardSettings settings;
  settings.failure_reward = -2;
  VerifierReward reward(settings);
  const std::vector<RewardRequest> requests = {
      {"", "#### 4", &four}, {"", "#### 5", &four}, {"", "Paris", &word}};
  const auto results = reward.score_all(requests);
  EXPECT_EQ(results[0].reward, 1);
  EXPECT_EQ(results[1].reward, 0);
  EXPECT_FALSE(results[1].failed);
  EXPECT_EQ(results[1].message, "5 is not the answer");
  EXPECT_TRUE(results[2].failed);
  EXPECT_EQ(results[2].reward, -2);
  EXPECT_TRUE(results[2].valid) << "a reward stands in its place";
  EXPECT_FALSE(VerifierReward().score(requests[2]).valid);
  EXPECT_EQ(count_failures(results), 1);
  EXPECT_EQ(reward.score(requests[0]).reward, 1);
}

TEST(VerifierReward, ADatasetItCannotScoreIsRefusedAtTheStart) {
  const VerifierReward reward;
  EXPECT_NO_THROW(reward.check(Dataset({{"a", "q", {}, "#### 4"}}, "file.jsonl")));
  try {
    reward.check(Dataset({{"a", "q", {}, "#### 4"}, {"b", "q", {}, "Paris"}}, "file.jsonl"));
    FAIL();
  } catch (const UserError& error) {
    EXPECT_TRUE(std::string(error.what()).starts_with("file.jsonl: problem 'b': ")) << error.what();
  }
}

TEST(VerifierReward, IsTheDefault) {
  const auto reward = make_reward("", {});
  EXPECT_NE(dynamic_cast<VerifierReward*>(reward.get()), nullptr);
  EXPECT_THROW(make_reward("nonsense", {}), UserError);
}

TEST(RewardSettings, TheVerifierGetsItsSettings) {
  const auto settings = parse_settings<RewardSettings>("verifier: {require_marker: true}\n", "c.yaml");
  const Problem four{"a", "2+2", {}, "#### 4"};
  EXPECT_EQ(VerifierReward(settings).score({"", "4", &four}).reward, 0);
  EXPECT_EQ(VerifierReward(settings).score({"", "#### 4", &four}).reward, 1);
  EXPECT_THROW(parse_settings<RewardSettings>("workers: 0\n", "c.yaml"), UserError);
}

}  // namespace
}  // namespace bough
