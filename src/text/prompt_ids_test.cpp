#include "text/prompt_ids.h"

#include <gtest/gtest.h>

#include "base/json.h"

namespace bough {
namespace {

// A byte-level tokenizer whose own template puts token 256 in front of a text.
Tokenizer with_bos() {
  Json file = parse_json(byte_level_tokenizer_json(), "tokenizer.json");
  file["post_processor"] = parse_json(R"({"type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
               {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens":
      {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}}})",
                                      "post_processor");
  return Tokenizer::from_json(file.dump(), "tokenizer.json");
}

TEST(PromptIds, APromptThatBeginsWithTheBosGetsItOnce) {
  const Tokenizer tokenizer = with_bos();
  const std::vector<int32_t> once = {256, 'h', 'i'};
  EXPECT_EQ(tokenizer.encode("<|endoftext|>hi", true), (std::vector<int32_t>{256, 256, 'h', 'i'}));
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(encode_plain_prompt(tokenizer, "hi"), once);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(encode_plain_prompt(tokenizer, "<|endoftext|>hi"), once);
  EXPECT_EQ(encode_plain_prompt(tokenizer, "<|endoftext|>hi"), once);
  const std::string warning = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(warning.find("<|endoftext|>"), std::string::npos);
  EXPECT_EQ(warning.find("get it once"), warning.rfind("get it once")) << "said once";
  EXPECT_EQ(encode_plain_prompt(tokenizer, "<|endoftext|>"), std::vector<int32_t>{256});
  EXPECT_EQ(encode_plain_prompt(tokenizer, ""), std::vector<int32_t>{256});
}

TEST(PromptIds, WithoutABosNothingChanges) {
  const Tokenizer tokenizer = Tokenizer::from_json(byte_level_tokenizer_json(), "tokenizer.json");
  EXPECT_EQ(encode_plain_prompt(tokenizer, "aab"), (std::vector<int32_t>{'a', 'a', 'b'}));
  EXPECT_EQ(encode_plain_prompt(tokenizer, "<|endoftext|><|endoftext|>"), (std::vector<int32_t>{256, 256}));
}

}  // namespace
}  // namespace bough
