#include "engine/rollouts.h"

#include <gtest/gtest.h>

#include "engine/stop_strings.h"

namespace bough {
namespace {

TEST(PartialRollouts, ReadBackWithTheirPageChoices) {
  PartialRollout partial{
      .sample = {.token_ids = {7, 8},
                 .logprobs = {-1, -2},
                 .raw_logprobs = {-3, -4},
                 .sampling_logprobs = {-5, -6},
                 .versions = {3, 4},
                 .page_choices = {.positions = {2, 3}, .begin = {0, 1}, .pages = {0, 0, 1}},
                 .finish_reason = FinishReason::kStop},
      .has_ended = true};
  const PartialRollout again = partial_rollout_from_json(partial_rollout_to_json(partial));
  EXPECT_EQ(again.sample.token_ids, partial.sample.token_ids);
  EXPECT_EQ(again.sample.sampling_logprobs, partial.sample.sampling_logprobs);
  EXPECT_EQ(again.sample.finish_reason, FinishReason::kStop);
  EXPECT_TRUE(again.has_ended);
  EXPECT_EQ(again.sample.page_choices.positions, partial.sample.page_choices.positions);
  EXPECT_EQ(again.sample.page_choices.pages, partial.sample.page_choices.pages);
}

TEST(Rollouts, MaskIsOneExactlyOnTheResponse) {
  GenerationResult result;
  result.prompt_ids = {5, 6};
  result.temperature = 0.7;
  GeneratedSample& sample = result.samples.emplace_back();
  sample.token_ids = {7, 8, 9};
  sample.logprobs = {-1, -2, -3};
  sample.raw_logprobs = {-4, -5, -6};
  sample.versions = {3, 3, 4};
  sample.finish_reason = FinishReason::kStopString;
  const Trajectory rollout = to_rollouts(result, "g").at(0);
  EXPECT_EQ(rollout.group, "g");
  EXPECT_EQ(rollout.temperature, 0.7);
  EXPECT_EQ(rollout.input_ids, (std::vector<int32_t>{5, 6, 7, 8, 9}));
  EXPECT_EQ(rollout.loss_mask, (std::vector<uint8_t>{0, 0, 1, 1, 1}));
  EXPECT_EQ(rollout.logprobs, (std::vector<float>{0, 0, -1, -2, -3}));
  EXPECT_EQ(rollout.versions, (std::vector<int32_t>{-1, -1, 3, 3, 4}));
  EXPECT_EQ(rollout.finish_reason, "stop_string");
  EXPECT_EQ(rollout.columns.at("raw_logprobs"), (std::vector<double>{-4, -5, -6}));
  EXPECT_TRUE(to_rollout(result, 0, "g").columns.empty());
  EXPECT_FALSE(rollout.reward.has_value());
}

TEST(StopMatcher, FindsMatchesThatEndInTheNewBytes) {
  const std::vector<std::string> stops = {"abc", "b"};
  StopMatcher matcher(&stops);
  EXPECT_FALSE(matcher.push("xa"));
  EXPECT_TRUE(matcher.push("b"));
  EXPECT_FALSE(matcher.push("d")) << "a match that ended earlier is not found again";
  EXPECT_FALSE(matcher.push("a"));
  EXPECT_FALSE(matcher.push(""));
  EXPECT_TRUE(matcher.push("bcde"));
  const std::vector<std::string> one = {"\n\nQ"};
  StopMatcher slow(&one);
  for (const char c : std::string("\nQ\n\n\n")) EXPECT_FALSE(slow.push(std::string(1, c)));
  EXPECT_TRUE(slow.push("Q"));
}

}  // namespace
}  // namespace bough
