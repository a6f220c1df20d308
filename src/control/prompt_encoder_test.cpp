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
  example.messages = {message_of("user", "1+1"), message_of("assistant", "2"), message_of("user", "2+2"),
                      message_of("assistant", "4")};
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
    example.messages = {message_of("user", "2+2"), message_of("assistant", content)};
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

constexpr const char* kToolTemplate =
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<|endoftext|>{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% "
    "endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}";

SftExample weather() {
  SftExample example;
  example.messages = template_messages(OrderedJson::parse(R"([{"role": "user", "content": "weather?"},
      {"role": "assistant", "content": null, "reasoning_content": "look",
       "tool_calls": [{"name": "get", "arguments": "{\"city\": \"Oslo\"}"}]}])"));
  example.tools = OrderedJson::parse(R"([{"name": "get"}])");
  return example;
}

// Not only up to a special token that belongs to a call.
TEST(PromptEncoder, ReasoningAndCallsAreLearnedAndToolsAreShown) {
  const PromptEncoder encoder(Tokenizer::from_json(byte_level_tokenizer_json(), "tokenizer.json"),
                              ChatTemplate::from_text(kToolTemplate, "test"));
  SftExample example = weather();
  EXPECT_EQ(learned(encoder.encode(example, 256)),
            R"(<think>look</think>!{"name": "get", "arguments": {"city": "Oslo"}}!)");
  Problem problem;
  problem.messages = example.messages;
  problem.messages.push_back(message_of("tool", "rain"));
  problem.tools = example.tools;
  EXPECT_EQ(
      encoder.encode(problem).text,
      R"(<tools>[{"name": "get"}]</tools>[user]weather?<|im_end|>)"
      "\n"
      R"([assistant]<think>look</think><|endoftext|>{"name": "get", "arguments": {"city": "Oslo"}}<|im_end|>)"
      "\n[tool]rain<|im_end|>\n[assistant]");
}

// A template that does not show a field would make the model learn, or answer, something else.
TEST(PromptEncoder, RefusesFieldsThatTheTemplateDoesNotShow) {
  const PromptEncoder encoder = testing::byte_level_encoder();
  const auto error_of = [&](const SftExample& example) -> std::string {
    try {
      encoder.encode(example, 258);
    } catch (const UserError& error) {
      return error.what();
    }
    return "no error";
  };
  SftExample example = weather();
  example.tools = nullptr;
  EXPECT_TRUE(error_of(example).starts_with("messages[1].tool_calls: the model's chat template does not"));
  example.messages[1].erase("tool_calls");
  EXPECT_TRUE(error_of(example).starts_with("messages[1].reasoning_content: the model's chat template"));
  example.messages[1] = message_of("assistant", "sun");
  EXPECT_EQ(error_of(example), "no error");
  example.tools = weather().tools;
  EXPECT_TRUE(error_of(example).starts_with("tools: the model's chat template does not show tools"));
}

TEST(PromptEncoder, RefusesToolsThatThePromptDoesNotShow) {
  const auto error_of = [&](const auto& asked, const char* jinja) -> std::string {
    try {
      PromptEncoder(Tokenizer::from_json(byte_level_tokenizer_json(), "tokenizer.json"),
                    ChatTemplate::from_text(jinja, "test"))
          .encode(asked);
    } catch (const UserError& error) {
      return error.what();
    }
    return "no error";
  };
  const OrderedJson tools = OrderedJson::parse(R"([{"type": "function", "function": {"name": "get"}}])");
  Problem plain;
  plain.prompt = "q";
  plain.tools = tools;
  EXPECT_TRUE(error_of(plain, kToolTemplate).starts_with("tools: a plain prompt shows no tools"));
  // Only without a system message.
  constexpr const char* kNoSystem =
      "{% if messages[0].role != 'system' and tools %}{{ tools }}{% endif %}"
      "{% for m in messages %}{{ m.content }}{% endfor %}";
  Problem chat;
  chat.tools = tools;
  chat.messages = {message_of("user", "q")};
  EXPECT_EQ(error_of(chat, kNoSystem), "no error");
  chat.messages = {message_of("system", "s"), message_of("user", "q")};
  EXPECT_TRUE(error_of(chat, kNoSystem).starts_with("tools: the model's chat template does not show tools"));
  // Without names, but with something else of them.
  EXPECT_EQ(error_of(chat, "{{ tools | length if tools }}{{ messages[0].content }}"), "no error");
}

TEST(PromptEncoder, PlainExamplesWithToolsAreRefused) {
  SftExample example;
  example.prompt = "q";
  example.completion = "a";
  example.tools = weather().tools;
  EXPECT_THROW(testing::byte_level_encoder().encode(example, 258), UserError);
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
  example.messages = {message_of("user", "1+1"), message_of("assistant", "2")};
  EXPECT_EQ(learned(encoder.encode(example, std::nullopt)), "2!");
}

TEST(PromptEncoder, SaysWhatIsMissing) {
  const PromptEncoder plain(Tokenizer::from_json(byte_level_tokenizer_json(), "tokenizer.json"));
  Problem chat;
  chat.messages = {message_of("user", "hello")};
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
