#include "data/dataset.h"

#include <gtest/gtest.h>

#include <fstream>

#include "base/error.h"

namespace bough {
namespace {

OrderedJson conversation_of(const std::vector<std::pair<std::string, std::string>>& messages) {
  OrderedJson out = OrderedJson::array();
  for (const auto& [role, content] : messages) out.push_back(message_of(role, content));
  return out;
}

class DatasetFile : public testing::Test {
 protected:
  DatasetFile() : folder_(std::filesystem::path(testing::TempDir()) / "bough_dataset_test") {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    settings_.path = (folder_ / "data.jsonl").string();
  }
  ~DatasetFile() override { std::filesystem::remove_all(folder_); }

  void write(const std::string& text, const char* name = "data.jsonl") {
    std::ofstream(folder_ / name) << text;
  }
  Dataset read(const std::string& text) {
    write(text);
    return read_dataset(settings_);
  }
  std::vector<SftExample> read_examples(const std::string& text) {
    write(text);
    return read_sft(settings_);
  }
  // Returns the message of the UserError that reading `text` throws, without the folder's name.
  std::string error_of(const std::string& text, bool sft = false) {
    write(text);
    try {
      if (sft) read_sft(settings_);
      else read_dataset(settings_);
    } catch (const UserError& error) {
      std::string what = error.what();
      if (const size_t at = what.find(folder_.string()); at != std::string::npos)
        what.erase(at, folder_.string().size() + 1);
      return what;
    }
    return "no error";
  }

  std::filesystem::path folder_;
  DatasetSettings settings_;
};

TEST_F(DatasetFile, ReadsGsm8k) {
  const Dataset dataset = read(
      R"({"question": "Natalia sold 48 clips.", "answer": "48/2 = 24\n#### 24"}

{"question": "Weng earns $12.", "answer": 10, "level": 3, "id": "w"})"
      "\r\n");
  ASSERT_EQ(dataset.size(), 2u);
  EXPECT_EQ(dataset[0].prompt, "Q: Natalia sold 48 clips.\nA:");
  EXPECT_EQ(dataset[0].answer, "48/2 = 24\n#### 24");
  EXPECT_EQ(dataset[0].id, "1");
  EXPECT_EQ(dataset[1].answer, "10");
  EXPECT_EQ(dataset[1].id, "w");
  EXPECT_EQ(dataset[1].fields["level"], 3);
}

TEST_F(DatasetFile, TakesPromptsAsTheyStand) {
  const Dataset dataset = read(R"({"prompt": "1+1=", "question": "what?", "answer": "2"})");
  EXPECT_EQ(dataset[0].prompt, "1+1=");
  EXPECT_TRUE(dataset[0].messages.empty());
}

TEST_F(DatasetFile, ReadsConversations) {
  const Dataset dataset = read(
      R"({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "answer": "4"}
{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "#### 5"}]}
{"prompt": [{"role": "user", "content": "v"}], "answer": "6"}
{"messages": [{"role": "system", "content": "ticket"}, {"role": "assistant", "content": "7"}]}
)");
  EXPECT_EQ(dataset[0].messages, conversation_of({{"system", "s"}, {"user", "u"}}));
  EXPECT_EQ(dataset[1].messages, conversation_of({{"user", "u"}}));
  EXPECT_EQ(dataset[1].answer, "#### 5");
  EXPECT_EQ(dataset[2].messages, conversation_of({{"user", "v"}}));
  EXPECT_EQ(dataset[2].prompt, "");
  EXPECT_EQ(dataset[3].messages, conversation_of({{"system", "ticket"}}));
}

TEST_F(DatasetFile, ChatFormatMakesConversations) {
  settings_.format = "chat";
  settings_.layout.system = "Be brief.";
  settings_.few_shot.shots = 1;
  const Dataset dataset = read(R"({"question": "a", "answer": "1"}
{"question": "b", "answer": "2"}
)");
  ASSERT_EQ(dataset.size(), 1u);
  EXPECT_EQ(dataset[0].messages,
            conversation_of({{"system", "Be brief."}, {"user", "a"}, {"assistant", "1"}, {"user", "b"}}));
}

TEST_F(DatasetFile, WorkedExamplesComeFirstAndAreNotAsked) {
  settings_.few_shot.shots = 2;
  settings_.layout.question_template = "{question}? ";
  settings_.layout.answer_prefix = "";
  settings_.layout.separator = "; ";
  const std::string text = R"({"question": "a", "answer": "1"}
{"question": "b", "answer": "2"}
{"question": "c", "answer": "3"}
{"question": "a", "answer": "1"}
)";
  const Dataset own = read(text);
  ASSERT_EQ(own.size(), 1u);  // the fourth line repeats the first, which is a worked example
  EXPECT_EQ(own[0].prompt, "a? 1; b? 2; c? ");

  write(R"({"question": "x", "answer": "8"}
{"prompt": "y! ", "answer": "9"}
)",
        "examples.jsonl");
  settings_.few_shot.path = (folder_ / "examples.jsonl").string();
  const Dataset other = read(text);
  ASSERT_EQ(other.size(), 4u);
  EXPECT_EQ(other[1].prompt, "x? 8; y! 9; b? ");

  settings_.few_shot.shots = 3;
  EXPECT_NE(error_of(text).find("few_shot.shots is 3, but the file has only 2 records"), std::string::npos);
}

TEST_F(DatasetFile, KeysAreSettings) {
  settings_.question_key = "Problem";
  settings_.answer_key = "Solution";
  settings_.id_key = "uid";
  const Dataset dataset = read(R"({"Problem": "p", "Solution": "#### 1", "uid": 7, "prompt": null})");
  EXPECT_EQ(dataset[0].prompt, "Q: p\nA:");
  EXPECT_EQ(dataset[0].answer, "#### 1");
  EXPECT_EQ(dataset[0].id, "7");
}

TEST_F(DatasetFile, AnswersCanBeOptional) {
  EXPECT_TRUE(error_of(R"({"question": "q"})").starts_with("data.jsonl:1: answer is missing"));
  settings_.answer_required = false;
  EXPECT_EQ(read(R"({"question": "q"})")[0].answer, "");
}

TEST_F(DatasetFile, MaxProblems) {
  settings_.max_problems = 2;
  EXPECT_EQ(read(R"({"question": "a", "answer": "1"}
{"question": "b", "answer": "2"}
{"question": "c", "answer": "3"}
)")
                .size(),
            2u);
}

TEST_F(DatasetFile, ErrorsNameLineFieldAndWhatIsThere) {
  const std::string good = R"({"question": "q", "answer": "1"}
)";
  const auto expect = [&](const std::string& line, const std::string& begin) {
    const std::string got = error_of(good + "\n" + line + "\n");
    EXPECT_TRUE(got.starts_with(begin))
        << "line:     " << line << "\ngot:      " << got << "\nexpected: " << begin;
  };
  expect(R"({"question": )", "data.jsonl:3:");
  expect(R"({"question": "q", "answer": NaN})",
         "data.jsonl:3:29: not valid JSON: NaN and Infinity are no JSON; write null, or a text, after");
  expect("[1]", "data.jsonl:3: the line: got array '[1]', expected an object");
  expect(R"({"question": 3, "answer": "1"})", "data.jsonl:3: question: got number '3', expected a text");
  expect(R"({"question": "q", "answer": [1]})",
         "data.jsonl:3: answer: got array '[1]', expected a text or a number");
  expect(R"({"question": "q", "answer": true})", "data.jsonl:3: answer: got boolean 'true'");
  expect(R"({"q": "q", "answer": "1"})",
         "data.jsonl:3: none of the fields messages, prompt and question is there "
         "(the line has: 'q, answer')");
  expect(R"({"question": "", "answer": "1"})", "data.jsonl:3: question: the text is empty");
  expect(R"({"question": "q", "answer": "1", "id": [1]})", "data.jsonl:3: id: got array");
  expect(R"({"messages": [], "answer": "1"})", "data.jsonl:3: messages: the list is empty");
  expect(R"({"messages": "hi", "answer": "1"})", "data.jsonl:3: messages: got string 'hi', expected a list");
  expect(R"({"messages": [3], "answer": "1"})",
         "data.jsonl:3: messages[0]: got number '3', expected an object");
  expect(R"({"messages": [{"role": "user"}], "answer": "1"})",
         "data.jsonl:3: messages[0].content is missing");
  expect(R"({"messages": [{"role": "user", "content": null}]})",
         "data.jsonl:3: messages[0].content: got null");
  expect(R"({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": null}]})",
         "data.jsonl:3: messages[1].content: got nothing, and the message has no tool_calls");
  expect(R"({"messages": [{"role": "user", "content": [{"type": "image"}]}]})",
         "data.jsonl:3: messages[0].content: parts of type 'image' are not supported");
  expect(R"({"messages": [{"role": "user", "content": "u"}], "answer": 1, "tools": "hammer"})",
         "data.jsonl:3: tools:1:1: not valid JSON");
  expect(R"({"messages": [{"role": "user", "content": "u"}], "answer": 1, "tools": [{}]})",
         "data.jsonl:3: tools[0].function.name: got nothing, expected a text");
  expect(R"({"messages": [{"role": "bot", "content": "x"}]})", "data.jsonl:3: messages[0].role: got 'bot'");
  expect(R"({"messages": [{"role": "assistant", "content": "x"}]})",
         "data.jsonl:3: messages: expected a message before the answer, got none");
  expect(R"({"messages": [{"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}]})",
         "data.jsonl:3: messages: expected a message before the answer, got one of the assistant");
  expect("{\"question\": \"\xFF\", \"answer\": \"1\"}", "data.jsonl:3:");
  expect(R"({"question": "q", "answer": 1e999})", "data.jsonl:3:");
  expect(R"({"question": "q", "answer": "1", "id": "1"})", "data.jsonl: two problems have the id '1'");
}

TEST_F(DatasetFile, ErrorsOfTheWholeFile) {
  EXPECT_NE(error_of("").find("data.jsonl"), std::string::npos);
  EXPECT_EQ(error_of("\n \n"), "data.jsonl: no records: every line is blank");
  EXPECT_TRUE(error_of("PAR1\x15\x04").starts_with("data.jsonl: a Parquet file, expected JSON"));
  settings_.path = folder_.string();
  EXPECT_THROW(read_dataset(settings_), UserError);
  settings_.path = (folder_ / "missing.jsonl").string();
  EXPECT_THROW(read_dataset(settings_), UserError);
  settings_.path = "";
  EXPECT_THROW(read_dataset(settings_), UserError);
}

TEST_F(DatasetFile, TemplateNeedsItsPlaceholder) {
  settings_.layout.question_template = "Q: {Question}";
  EXPECT_TRUE(error_of(R"({"question": "q", "answer": "1"})").starts_with("question_template: got"));
  EXPECT_EQ(render_question("{question}", {.question_template = "<{question}|{question}>"}),
            "<{question}|{question}>");
}

TEST_F(DatasetFile, AByteOrderMarkIsNoError) {
  EXPECT_EQ(read("\xEF\xBB\xBF{\"question\": \"q\", \"answer\": \"1\"}").size(), 1u);
}

TEST_F(DatasetFile, SftExamplesOfEveryKind) {
  const auto examples = read_examples(
      R"({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}
{"prompt": "p", "completion": "c"}
{"prompt": "p", "answer": "a"}
{"question": "q", "answer": "a"}
)");
  ASSERT_EQ(examples.size(), 4u);
  EXPECT_EQ(examples[0].messages, conversation_of({{"user", "u"}, {"assistant", "a"}}));
  EXPECT_EQ(examples[1].prompt + "|" + examples[1].completion, "p|c");
  EXPECT_EQ(examples[2].prompt + "|" + examples[2].completion, "p| a");
  EXPECT_EQ(examples[3].prompt + "|" + examples[3].completion, "Q: q\nA:| a");
  EXPECT_TRUE(error_of(R"({"question": "q"})", true).starts_with("data.jsonl:1: nothing to learn"));
  settings_.format = "chat";
  EXPECT_EQ(read_examples(R"({"prompt": "p", "completion": "c"})")[0].messages,
            conversation_of({{"user", "p"}, {"assistant", "c"}}));
}

constexpr const char* kWeather =
    R"({"messages": [{"role": "developer", "content": [{"type": "text", "text": "s"}]},
 {"role": "user", "content": "weather?", "name": null}, {"role": "assistant", "content": null,
 "reasoning": "look it up", "tool_calls": [{"id": "c", "type": "function", "function":
 {"name": "get", "arguments": "{\"z\": 1, \"a\": 2}"}}]}], "tools": [{"name": "get", "z": 1, "a": 2}]})";

std::string one_line(std::string text) {
  std::erase(text, '\n');
  return text;
}

// Keys keep their order, because templates show it to the model.
TEST_F(DatasetFile, EveryFieldOfAMessageAndTheToolsArePassedOn) {
  const SftExample example = read_examples(one_line(kWeather)).at(0);
  EXPECT_EQ(
      dump_ordered(example.messages),
      R"([{"role":"system","content":"s"},{"role":"user","content":"weather?"},{"role":"assistant",)"
      R"("content":null,"reasoning":"look it up","tool_calls":[{"id":"c","type":"function","function":{"name":"get",)"
      R"("arguments":{"z":1,"a":2}}}],"reasoning_content":"look it up"}])");
  EXPECT_EQ(dump_ordered(example.tools), R"([{"name":"get","z":1,"a":2}])");

  settings_.answer_required = false;
  const Dataset asked = read(one_line(kWeather));
  EXPECT_EQ(asked[0].messages.size(), 2u);
  EXPECT_EQ(asked[0].answer, "") << "a call is no reference answer";
  EXPECT_EQ(dump_ordered(asked[0].tools), R"([{"name":"get","z":1,"a":2}])");
  settings_.answer_required = true;
  EXPECT_TRUE(error_of(one_line(kWeather)).starts_with("data.jsonl:1: answer is missing"));

  settings_.tools_key = "functions";
  EXPECT_TRUE(read_examples(one_line(kWeather)).at(0).tools.is_null());
  for (const char* format : {"text", "chat"}) {
    settings_.format = format;
    const char* line = R"({"question": "q", "answer": 1, "functions": "[{\"name\": \"f\"}]"})";
    EXPECT_EQ(read(line)[0].tools.dump(), R"([{"name":"f"}])");
    EXPECT_EQ(read_examples(line)[0].tools.dump(), R"([{"name":"f"}])");
  }
}

// The answer of the line is the reference for RL; the message is what a model learns to write.
TEST_F(DatasetFile, SftLearnsTheLastMessage) {
  const auto examples = read_examples(
      R"({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "it is 5"}], "answer": 5})");
  EXPECT_EQ(examples.at(0).messages.at(1).at("content"), "it is 5");
}

TEST_F(DatasetFile, NumbersKeepTheirDigits) {
  const Dataset dataset = read(
      R"({"question": "q", "answer": 123456789012345678901234567890, "id": 98765432109876543210, "n": 2.5}
{"question": "q", "answer": 3.14159265358979323846}
{"question": "q", "answer": 0.30000000000000004}
{"question": "q", "answer": 18446744073709551615})");
  EXPECT_EQ(dataset[0].answer, "123456789012345678901234567890");
  EXPECT_EQ(dataset[0].fields["answer"], "123456789012345678901234567890");
  EXPECT_EQ(dataset[0].id, "98765432109876543210");
  EXPECT_EQ(dataset[1].answer, "3.14159265358979323846");
  EXPECT_TRUE(dataset[1].fields["answer"].is_number());
  EXPECT_EQ(dataset[2].answer, "0.30000000000000004");
  EXPECT_EQ(dataset[3].answer, "18446744073709551615");
  EXPECT_EQ(error_of(R"({"question": "q", "answer": 1, "n": 123456789012345678901})"),
            "data.jsonl:1: n: the whole number '123456789012345678901' exceeds 64 bits; write it as a text");
  EXPECT_TRUE(
      error_of(R"({"question": "q", "answer": 1, "n": [123456789012345678901]})").find("exceeds 64 bits") !=
      std::string::npos);
}

TEST(DatasetSettingsYaml, ReadsAndPrints) {
  const auto settings = parse_settings<DatasetSettings>(
      "path: a.jsonl\nfew_shot: {shots: 4}\nlayout: {separator: '|'}\n", "c.yaml");
  EXPECT_EQ(settings.few_shot.shots, 4);
  EXPECT_EQ(settings.layout.separator, "|");
  EXPECT_TRUE(
      settings_diff(settings, parse_settings<DatasetSettings>(settings_yaml(settings), "again")).empty());
  EXPECT_THROW(parse_settings<DatasetSettings>("format: html\n", "c.yaml"), UserError);
  EXPECT_THROW(parse_settings<DatasetSettings>("layout: {question_template: Q}\n", "c.yaml"), UserError);
}

}  // namespace
}  // namespace bough
