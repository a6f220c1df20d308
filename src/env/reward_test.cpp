#include "env/reward.h"

#include <gtest/gtest.h>

#include <functional>

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
  for (const std::string text : {"", "number", "{verifier: number}", "[{verifier: number}]"}) {
    const auto reward = make_reward(text, RewardSettings{});
    EXPECT_NE(dynamic_cast<VerifierReward*>(reward.get()), nullptr) << text;
  }
  EXPECT_NE(dynamic_cast<VerifierReward*>(make_builtin_reward("number", {}).get()), nullptr);
}

std::string error_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

TEST(RewardSetting, InvalidSettingsAreNamed) {
  const auto expect = [](const std::string& text, const std::string& part) {
    const std::string got = error_of([&] { make_reward(text, RewardSettings{}); });
    EXPECT_NE(got.find(part), std::string::npos) << text << "\ngot: " << got << "\nexpected: " << part;
  };
  expect("nonsense", "got 'nonsense', expected FILE.py:FUNCTION");
  expect("https://judge/score", "https is not supported");
  expect("[{name: a}]", "reward[0]: got none of function, command, url and verifier, expected one of them");
  expect("[{function: 'a.py:f', command: x}]", "got several of function, command, url and verifier");
  expect("[{verifier: maths}]", "verifier: got 'maths', expected one of number");
  expect("[{verifier: number, name: 'a/b'}]", "name: got 'a/b', expected letters");
  expect("[{verifier: number, ready_line: true}]", "ready_line applies to a command only");
  expect("[{verifier: number, wieght: 2}]", "unknown setting 'reward[0].wieght'; did you mean 'weight'?");
  expect("[{verifier: number}, {command: ./judge}]", "the entry with command './judge' has no name");
  expect("[{verifier: number}, {verifier: number}]", "two entries are named 'number'");
  EXPECT_THROW(make_builtin_reward("nonsense", {}), UserError);
}

struct Holder {
  RewardEntries reward;

  template <class V>
  void visit(V& v) {
    v("reward", reward, "");
  }
};

TEST(RewardSetting, PrintsWhatParsesBack) {
  const auto printed = [](const std::string& text) {
    const auto parsed = parse_settings<Holder>("", "", {"reward=" + text});
    const std::string yaml = settings_yaml(parsed);
    EXPECT_EQ(settings_yaml(parse_settings<Holder>(yaml, "c.yaml")), yaml);
    return yaml;
  };
  EXPECT_EQ(printed(""), "reward: \"\"\n");
  EXPECT_EQ(printed("number"), "reward: number\n");
  EXPECT_EQ(printed("[my_reward.py:score]"), "reward: \"my_reward.py:score\"\n");
  EXPECT_EQ(printed("http://judge:80/x"), "reward: \"http://judge:80/x\"\n");
  EXPECT_EQ(printed("[{verifier: number, weight: 2}]"), "reward: [{verifier: number, weight: 2.0}]\n");
  EXPECT_EQ(printed("[number, {command: './judge -x', name: style, ready_line: true}]"),
            "reward: [{verifier: number}, {command: \"./judge -x\", name: style, ready_line: true}]\n");
}

// Returns the number that the completion begins with. "x" fails.
class Prefix final : public RewardFunction {
 public:
  explicit Prefix(size_t at) : at_(at) {}
  std::vector<RewardResult> score_all(std::span<const RewardRequest> requests) override {
    std::vector<RewardResult> results;
    for (const RewardRequest& request : requests) {
      const char c = request.completion[at_];
      if (c == 'x') results.push_back(failed_reward(-7.0, "an x"));
      else if (c == 'h') results.push_back({.reward = 1e308});
      else results.push_back({.reward = static_cast<double>(c - '0'), .message = str("it is ", c)});
    }
    return results;
  }

 private:
  size_t at_;
};

std::vector<WeightedReward::Part> two_parts() {
  std::vector<WeightedReward::Part> parts;
  parts.push_back({"first", 1, std::make_unique<Prefix>(0)});
  parts.push_back({"second", -10, std::make_unique<Prefix>(1)});
  return parts;
}

TEST(WeightedReward, IsTheSumOfItsParts) {
  WeightedReward reward(two_parts(), std::nullopt);
  const Problem problem{"a", "", {}, ""};
  const std::vector<RewardRequest> requests = {{"", "35", &problem}, {"", "00", &problem}};
  const auto results = reward.score_all(requests);
  EXPECT_EQ(results[0].reward, 3 - 50);
  EXPECT_EQ(results[0].rewards, (std::map<std::string, double>{{"first", 3}, {"second", 5}}));
  EXPECT_EQ(results[0].message, "first: it is 3; second: it is 5");
  EXPECT_TRUE(results[0].valid);
  EXPECT_EQ(results[1].reward, 0);
  EXPECT_TRUE(reward.score_all({}).empty());
}

TEST(WeightedReward, APartThatFailsIsNotAZero) {
  WeightedReward reward(two_parts(), std::nullopt);
  const Problem problem{"a", "", {}, ""};
  const std::vector<RewardRequest> requests = {
      {"", "3x", &problem}, {"", "12", &problem}, {"", "xx", &problem}, {"", "hh", &problem}};
  const auto results = reward.score_all(requests);
  EXPECT_TRUE(results[0].failed);
  EXPECT_FALSE(results[0].valid);
  EXPECT_EQ(results[0].message, "second: an x");
  EXPECT_EQ(results[0].rewards, (std::map<std::string, double>{{"first", 3}})) << "what could be had is kept";
  EXPECT_EQ(results[1].reward, 1 - 20) << "the others are not touched";
  EXPECT_EQ(results[2].message, "first: an x; second: an x");
  EXPECT_TRUE(results[3].failed) << "a sum that is not finite";
  EXPECT_NE(results[3].message.find("expected a finite number"), std::string::npos);

  WeightedReward with_substitute(two_parts(), 0.5);
  const RewardResult substituted = with_substitute.score(requests[0]);
  EXPECT_TRUE(substituted.failed && substituted.valid);
  EXPECT_EQ(substituted.reward, 0.5) << "of the whole, not of the part";
}

TEST(WeightedReward, IsMadeFromTheSetting) {
  const Problem four{"a", "2+2", {}, "#### 4"};
  const auto one = make_reward(std::string("{verifier: number, weight: 3}"), RewardSettings{});
  EXPECT_EQ(one->score({"", "4", &four}).reward, 3);
  EXPECT_EQ(one->score({"", "4", &four}).rewards, (std::map<std::string, double>{{"number", 1}}));
  EXPECT_TRUE(make_reward(std::string("number"), RewardSettings{})->score({"", "4", &four}).rewards.empty());
  const auto two = make_reward(
      std::string("[{verifier: number}, {name: again, verifier: number, weight: 0.5}]"), RewardSettings{});
  EXPECT_EQ(two->score({"", "4", &four}).reward, 1.5);
  EXPECT_THROW(two->check(Dataset({{"b", "q", {}, "Paris"}}, "file.jsonl")), UserError);
  EXPECT_NO_THROW(two->check(Dataset({four}, "file.jsonl")));
}

TEST(RewardResult, ATrajectoryKeepsIt) {
  Trajectory sample;
  set_reward(sample, {.reward = 2, .message = "well done", .rewards = {{"a", 1}, {"b", 1}}});
  EXPECT_EQ(sample.reward, 2);
  EXPECT_EQ(sample.rewards.size(), 2u);
  EXPECT_TRUE(sample.valid && !sample.reward_failure);
  Trajectory failed;
  set_reward(failed, failed_reward(std::nullopt, "why"));
  EXPECT_FALSE(failed.valid || failed.reward);
  EXPECT_EQ(failed.reward_failure, "why");
  Trajectory substituted;
  set_reward(substituted, failed_reward(-1, "why"));
  EXPECT_TRUE(substituted.valid);
  EXPECT_EQ(substituted.reward, -1);
  EXPECT_EQ(substituted.reward_failure, "why");
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
