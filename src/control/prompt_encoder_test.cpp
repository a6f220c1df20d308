#include "control/prompt_encoder.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "control/fakes.h"

namespace bough {
namespace {

std::string learned(const EncodedExample& example) {
  std::string text;
  for (size_t i = 0; i < example.ids.size(); ++i)
    if (example.loss_mask[i])
      text += example.ids[i] < 256 ? std::string(1, static_cast<char>(example.ids[i])) : "!";
  return text;
}

TEST(PromptEncoder, LearnsTheCompletionAndItsEnd) {
  const PromptEncoder encoder = testing::byte_level_encoder();
  SftExample example;
  example.prompt = "Q: 1+1\nA:";
  example.completion = " 2";
  EXPECT_EQ(learned(encoder.encode(example, 258)), " 2!");
  EXPECT_EQ(learned(encoder.encode(example, std::nullopt)), " 2");
  const EncodedExample encoded = encoder.encode(example, 258);
  EXPECT_EQ(encoded.ids.size(), encoded.loss_mask.size());
  // The tokens before the completion are those that the model gets as a prompt.
  Problem problem;
  problem.prompt = example.prompt;
  const EncodedPrompt prompt = encoder.encode(problem);
  EXPECT_TRUE(std::equal(prompt.ids.begin(), prompt.ids.end(), encoded.ids.begin()));
}

TEST(PromptEncoder, TheLastTurnOfAConversationIsLearnedUpToItsEnd) {
  const PromptEncoder encoder = testing::byte_level_encoder();
  SftExample example;
  example.messages = {{"user", "1+1"}, {"assistant", "2"}, {"user", "2+2"}, {"assistant", "4"}};
  EXPECT_EQ(learned(encoder.encode(example, 258)), "4!");
}

// For any format of conversation: a turn ends with the special token after the content, else with the stop
// token.
TEST(PromptEncoder, TheTemplateSaysHowATurnEnds) {
  const auto learned_with = [](const std::string& end, const std::string& content = "4") {
    const std::string source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + end +
                               "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";
    const PromptEncoder encoder(Tokenizer::from_json(byte_level_tokenizer_json(), "tokenizer.json"),
                                ChatTemplate::from_text(source, "test"));
    SftExample example;
    example.messages = {{"user", "2+2"}, {"assistant", content}};
    return learned(encoder.encode(example, 256));
  };
  EXPECT_EQ(learned_with("<|endoftext|>\n"), "4!");
  EXPECT_EQ(learned_with(" <|im_end|>\n<|endoftext|>"), "4 !");
  EXPECT_EQ(learned_with(""), "4!");
  EXPECT_EQ(learned_with("\n"), "4\n!");
  // Contents that contain the end of a turn, or are empty.
  EXPECT_EQ(learned_with("<|im_end|>\n", "a<|im_end|>b"), "a!b!");
  EXPECT_EQ(learned_with("<|im_end|>\n", "\n"), "\n!");
  EXPECT_EQ(learned_with("<|im_end|>\n", ""), "!");
}

// A tokenizer that puts a space in front of texts puts none between a prompt and its completion.
TEST(PromptEncoder, TheCompletionGoesOnAfterThePrompt) {
  Json file = Json::parse(byte_level_tokenizer_json());
  file["pre_tokenizer"]["add_prefix_space"] = true;
  const PromptEncoder encoder(Tokenizer::from_json(file.dump(), "tokenizer.json"), ChatTemplate());
  SftExample example;
  example.prompt = "1+1=";
  example.completion = "2";
  EXPECT_EQ(encoder.encode(example, std::nullopt).ids, (std::vector<int32_t>{' ', '1', '+', '1', '=', '2'}));
  example.messages = {{"user", "1+1"}, {"assistant", "2"}};
  EXPECT_EQ(learned(encoder.encode(example, std::nullopt)), "2!");
}

TEST(PromptEncoder, SaysWhatIsMissing) {
  const PromptEncoder plain(Tokenizer::from_json(byte_level_tokenizer_json(), "tokenizer.json"));
  Problem chat;
  chat.messages = {{"user", "hello"}};
  EXPECT_THROW(plain.encode(chat), UserError);
  EXPECT_NO_THROW(testing::byte_level_encoder().encode(chat));
  Problem empty;
  empty.id = "p7";
  try {
    plain.encode(empty);
    FAIL();
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("p7"), std::string::npos);
  }
}

}  // namespace
}  // namespace bough
