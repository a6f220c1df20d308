#include "data/dataset.h"

#include <gtest/gtest.h>

#include <fstream>

#include "base/error.h"

namespace bough {
namespace {

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
)");
  EXPECT_EQ(dataset[0].messages, (std::vector<Message>{{"system", "s"}, {"user", "u"}}));
  EXPECT_EQ(dataset[1].messages, (std::vector<Message>{{"user", "u"}}));
  EXPECT_EQ(dataset[1].answer, "#### 5");
  EXPECT_EQ(dataset[2].messages, (std::vector<Message>{{"user", "v"}}));
  EXPECT_EQ(dataset[2].prompt, "");
}

TEST_F(DatasetFile, ChatFormatMakesConversations) {
  settings_.format = "chat";
  settings_.layout.system = "Be brief.";
  settings_.few_shot.shots = 1;
  const Dataset dataset = read(R"({"question": "a", "answer": "1"}
{"question": "b", "answer": "2"}
)");
  ASSERT_EQ(dataset.size(), 1u);
  EXPECT_EQ(
      dataset[0].messages,
      (std::vector<Message>{{"system", "Be brief."}, {"user", "a"}, {"assistant", "1"}, {"user", "b"}}));
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
  expect("[1]", "data.jsonl:3: the line: got array '[1]', expected an object");
  expect(R"({"question": 3, "answer": "1"})", "data.jsonl:3: question: got number '3', expected a text");
  expect(R"({"question": "q", "answer": [1]})",
         "data.jsonl:3: answer: got array '[1]', expected a text or a number");
  expect(R"({"question": "q", "answer": true})", "data.jsonl:3: answer: got boolean 'true'");
  expect(R"({"q": "q", "answer": "1"})",
         "data.jsonl:3: none of the fields messages, prompt and question is there "
         "(the line has: 'answer, q')");
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
  expect(R"({"messages": [{"role": "bot", "content": "x"}]})", "data.jsonl:3: messages[0].role: got 'bot'");
  expect(R"({"messages": [{"role": "system", "content": "x"}], "answer": 1})",
         "data.jsonl:3: messages: expected a user or tool message before the answer, got a system "
         "message");
  expect("{\"question\": \"\xFF\", \"answer\": \"1\"}", "data.jsonl:3:");
  expect(R"({"question": "q", "answer": 1e999})", "data.jsonl:3:");
  expect(R"({"question": "q", "answer": "1", "id": "1"})", "data.jsonl: two problems have the id '1'");
}

TEST_F(DatasetFile, ErrorsOfTheWholeFile) {
  EXPECT_NE(error_of("").find("data.jsonl"), std::string::npos);
  EXPECT_EQ(error_of("\n \n"), "data.jsonl: no records: every line is blank");
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
  EXPECT_EQ(examples[0].messages, (std::vector<Message>{{"user", "u"}, {"assistant", "a"}}));
  EXPECT_EQ(examples[1].prompt + "|" + examples[1].completion, "p|c");
  EXPECT_EQ(examples[2].prompt + "|" + examples[2].completion, "p| a");
  EXPECT_EQ(examples[3].prompt + "|" + examples[3].completion, "Q: q\nA:| a");
  EXPECT_TRUE(error_of(R"({"question": "q"})", true).starts_with("data.jsonl:1: nothing to learn"));
  settings_.format = "chat";
  EXPECT_EQ(read_examples(R"({"prompt": "p", "completion": "c"})")[0].messages,
            (std::vector<Message>{{"user", "p"}, {"assistant", "c"}}));
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
