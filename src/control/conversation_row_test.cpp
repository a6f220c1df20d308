#include "control/conversation_row.h"

#include <gtest/gtest.h>

#include "control/fakes.h"

namespace bough {
namespace {

GeneratedSample two_tokens(int32_t first, int32_t top) {
  return {.token_ids = {first, testing::FakeEngine::kStop},
          .logprobs = {-1, -2},
          .raw_logprobs = {-1, -2},
          .sampling_logprobs = {-1, -2},
          .versions = {0, 0},
          .top_ids = {{top, 1}, {top + 1, 2}},
          .top_logprobs = {{-0.5f, -3}, {-0.6f, -4}},
          .page_choices = {},
          .finish_reason = FinishReason::kStop};
}

// Two turns, each with the engine's top-k tokens. Then the history is rewritten after the first turn.
TEST(ConversationRow, KeepsTopTokensAndWhichTokensWereSampled) {
  const testing::ByteChat chat;
  ConversationRow row;
  row.append_text(chat, "abc");
  row.append_turn(chat, two_tokens('x', 10), 0, {}, {});
  row.append_text(chat, "de");
  row.append_turn(chat, two_tokens('y', 20), 1, {}, {});
  row.append_text(chat, "f");
  row.check_integrity();
  const Trajectory whole = row.trajectory(chat, false);
  const std::vector<std::vector<int32_t>> top = {{}, {}, {}, {10, 1}, {11, 2}, {}, {}, {20, 1}, {21, 2}, {}};
  EXPECT_EQ(whole.top_ids, top);
  ASSERT_EQ(whole.top_logprobs.size(), top.size());
  EXPECT_EQ(whole.top_logprobs[8], (std::vector<float>{-0.6f, -4}));
  EXPECT_EQ(whole.loss_mask, (std::vector<uint8_t>{0, 0, 0, 1, 1, 0, 0, 1, 1, 0}));
  EXPECT_EQ(whole.sampled(), whole.loss_mask);
  EXPECT_FALSE(whole.columns.contains(kSampledColumn));

  ConversationRow rewritten = row.prefix(2);
  rewritten.append_text(chat, "g");
  rewritten.append_turn(chat, two_tokens('z', 30), 2, {}, {});
  rewritten.check_integrity();
  const Trajectory second = rewritten.trajectory(chat, false);
  EXPECT_EQ(second.loss_mask, (std::vector<uint8_t>{0, 0, 0, 0, 0, 0, 1, 1}));
  EXPECT_EQ(second.sampled(), (std::vector<uint8_t>{0, 0, 0, 1, 1, 0, 1, 1})) << "the first row trains two";
  EXPECT_EQ(second.top_ids[3], std::vector<int32_t>{}) << "only trained tokens need them";
  EXPECT_EQ(second.top_ids[6], (std::vector<int32_t>{30, 1}));
}

}  // namespace
}  // namespace bough
