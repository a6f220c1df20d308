#include "data/prompts.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <fstream>

#include "base/error.h"

namespace bough {
namespace {

class PromptsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::temp_directory_path() /
            str("bough_prompts_", ::getpid(), "_",
                ::testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  void TearDown() override { std::filesystem::remove_all(path_); }

  std::vector<Prompt> read(const std::string& text, int64_t vocab_size = 0, bool with_tokenizer = true) {
    std::ofstream(path_) << text;
    PromptReadOptions options;
    options.vocab_size = vocab_size;
    if (with_tokenizer) {
      options.encode = [](const Problem& problem) {
        std::string text = problem.prompt;
        for (const OrderedJson& message : problem.messages) text += message["content"].get<std::string>();
        if (!problem.tools.is_null()) text += "T";
        return std::vector<int32_t>(text.begin(), text.end());
      };
      options.max_length = 9;
    }
    return read_prompts(path_, options);
  }
  std::string refusal(const std::string& text, int64_t vocab_size = 0, bool with_tokenizer = true) {
    try {
      read(text, vocab_size, with_tokenizer);
    } catch (const UserError& error) {
      return error.what();
    }
    return "accepted";
  }

  std::filesystem::path path_;
};

TEST_F(PromptsTest, ReadsTextAndIds) {
  const auto prompts = read(
      "{\"prompt\": \"AB\", \"group\": \"g\"}\n\n{\"input_ids\": [1, 0], \"id\": 7, \"answer\": \"x\"}\n"
      "{\"prompt\": \"C\"}");
  ASSERT_EQ(prompts.size(), 3u);
  EXPECT_EQ(prompts[0].input_ids, (std::vector<int32_t>{65, 66}));
  EXPECT_EQ(prompts[0].group, "g");
  EXPECT_EQ(prompts[1].input_ids, (std::vector<int32_t>{1, 0}));
  EXPECT_EQ(prompts[1].group, "7");
  EXPECT_EQ(prompts[1].extra, Json({{"answer", "x"}}));
  EXPECT_EQ(prompts[2].group, "4") << "the line";
}

TEST_F(PromptsTest, ReadsConversations) {
  const auto prompts = read(
      R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "A"}]}], "tools": [{"name": "f"}], "x": 1}
{"prompt": "B", "messages": "a field like any other"}
{"prompt": [{"role": "user", "content": "A"}], "tools": [{"name": "f"}]})");
  EXPECT_EQ(prompts[0].input_ids, (std::vector<int32_t>{'A', 'T'}));
  EXPECT_EQ(prompts[0].extra, Json({{"x", 1}}));
  EXPECT_EQ(prompts[1].extra, Json({{"messages", "a field like any other"}}));
  EXPECT_EQ(prompts[2].input_ids, prompts[0].input_ids);
}

TEST_F(PromptsTest, ErrorsNameLineAndField) {
  const struct {
    const char* text;
    const char* expected;
  } cases[] = {
      {"{\"prompt\": \"a\"}\n{\"prompt\": ", ":2:"},
      {"[1]", ":1: expected an object"},
      {"{\"text\": \"a\"}", "neither"},
      {"{\"prompt\": \"a\", \"input_ids\": [1]}", "both"},
      {"{\"prompt\": 3}", "prompt: expected a text"},
      {"{\"prompt\": \"\"}", "prompt: is empty"},
      {R"({"prompt": "a", "tools": [{"name": "f"}]})", ":1: tools: a plain prompt shows no tools"},
      {"{\"input_ids\": []}", "input_ids: is empty"},
      {"{\"input_ids\": \"a\"}", "input_ids: expected a list"},
      {"{\"input_ids\": [1, 100]}", "position 1: expected a token id from 0 to 99, got '100'"},
      {"{\"input_ids\": [-1]}", "position 0"},
      {"{\"input_ids\": [1.5]}", "position 0"},
      {"{\"input_ids\": [18446744073709551615]}", "position 0"},
      {"{\"input_ids\": [1], \"group\": []}", "group: expected"},
      {R"({"messages": []})", ":1: messages: expected a list of messages"},
      {R"({"prompt": []})", ":1: prompt: expected a list of messages"},
      {R"({"messages": [{"role": "user"}]})", ":1: messages[0].content is missing"},
      {R"({"messages": [{"role": "assistant", "content": "a"}]})",
       ":1: messages: expected a message for the"},
      {R"({"prompt": "123456789"})", ":1: prompt: got 9 tokens, but the model's context is 9"},
      {"\n\n", "no prompts"},
  };
  for (const auto& c : cases) {
    const std::string message = refusal(c.text, 100);
    EXPECT_NE(message.find(c.expected), std::string::npos) << c.text << " -> " << message;
    EXPECT_NE(message.find(path_.string()), std::string::npos) << message;
  }
  EXPECT_NE(refusal("{\"prompt\": \"a\"}", 0, false).find("tokenizer.json"), std::string::npos);
  std::filesystem::remove(path_);
  EXPECT_THROW(read_prompts(path_, {}), UserError) << "missing";
  std::filesystem::create_directory(path_);
  EXPECT_THROW(read_prompts(path_, {}), UserError) << "a directory";
}

}  // namespace
}  // namespace bough
