#include "control/prompt_check.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/base_test_util.h"
#include "base/error.h"
#include "control/fakes.h"

namespace bough {
namespace {

class PromptCheckTest : public ::testing::Test {
 protected:
  PromptCheckTest() : encoder_(testing::byte_level_encoder()) {
    for (const size_t length : {3, 12, 9, 10})
      problems_.push_back({.id = std::to_string(problems_.size()),
                           .prompt = std::string(length, 'a') + "z",
                           .where = str("d.jsonl:", problems_.size() + 1)});
  }

  // The context leaves room for ten tokens.
  Dataset fit(const std::string& mode, int64_t max_length = 0) {
    settings_.overlong_prompts = mode;
    settings_.max_length = max_length;
    return fit_prompts(Dataset(problems_, "d.jsonl"), settings_, encoder_,
                       {.limits = {.vocab_size = 300, .max_length = 11, .max_length_reason = "positions"},
                        .shows_progress = false});
  }
  std::string error_of(const std::string& mode, int64_t max_length = 0) {
    try {
      fit(mode, max_length);
    } catch (const UserError& error) {
      return error.what();
    }
    return "no error";
  }
  static std::string ids_of(const Dataset& dataset) {
    std::string ids;
    for (const Problem& problem : dataset.problems()) ids += problem.id;
    return ids;
  }

  const PromptEncoder encoder_;
  std::vector<Problem> problems_;
  DatasetSettings settings_;
};

TEST_F(PromptCheckTest, TheFirstOverlongPromptIsNamedWithItsLine) {
  expect_names(error_of("error"),
               {"d.jsonl:2: the prompt has 13 tokens, expected at most 10", "2 of 4 prompts",
                "the model takes 11 by positions", "the longest has 13", "overlong_prompts"});
  expect_names(error_of("error", 4), {"d.jsonl:2: ", "3 of 4 prompts", "train_dataset.max_length is 4"});
  problems_.erase(problems_.begin() + 1);
  problems_.pop_back();
  EXPECT_EQ(error_of("error"), "no error");
}

TEST_F(PromptCheckTest, OverlongPromptsAreLeftOut) {
  EXPECT_EQ(ids_of(fit("drop")), "02");
  EXPECT_EQ(ids_of(fit("drop", 4)), "0");
  EXPECT_EQ(ids_of(fit("drop", 1000)), "02") << "the context counts, too";
  expect_names(error_of("drop", 2), {"d.jsonl: no problem is left", "4 of 4 prompts"});
}

TEST_F(PromptCheckTest, PlainPromptsAreCutAtTheirLeft) {
  const Dataset cut = fit("truncate_left");
  EXPECT_EQ(ids_of(cut), "0123");
  const EncodedPrompt prompt = encoder_.encode(cut[1]);
  EXPECT_EQ(prompt.ids.size(), 10u);
  EXPECT_EQ(prompt.text, "aaaaaaaaaz");
  EXPECT_EQ(encoder_.encode(cut[0]).text, "aaaz");

  std::vector<int32_t> ids = {258, 258, 'a', 'b', 'c'};
  EXPECT_EQ(encoder_.truncate_left(ids, 3), 2u);
  EXPECT_EQ(ids, (std::vector<int32_t>{258, 258, 'c'})) << "special tokens at the begin stay";

  problems_[1].messages = {message_of("user", "hello")};
  expect_names(error_of("truncate_left"),
               {"d.jsonl:2: the conversation has ", "cuts only plain prompts", "drop"});
}

TEST_F(PromptCheckTest, APromptThatCannotBeEncodedIsNamedWithItsLine) {
  problems_[2].prompt.clear();
  EXPECT_EQ(error_of("drop"), "d.jsonl:3: problem '2': its prompt is empty");
}

// The lengths are those of the file, so a test may write others to see that they are read.
TEST_F(PromptCheckTest, LengthsAreKeptByTheContentOfDataSetAndTokenizer) {
  const auto root = std::filesystem::temp_directory_path() / str("bough_prompt_check_", ::getpid());
  std::filesystem::create_directories(root / "model");
  std::ofstream(root / "model/tokenizer.json") << "one";
  ::setenv("BOUGH_CACHE", (root / "cache").c_str(), 1);
  const PromptCheckOptions options{.model = root / "model",
                                   .limits = {.vocab_size = 300, .max_length = 100, .max_length_reason = "p"},
                                   .shows_progress = false};
  const auto file = [&] { return prompt_length_file(Dataset(problems_, "d"), options.model); };
  const auto first = file();
  std::filesystem::create_directories(first.parent_path());
  std::ofstream(first) << "[4, 130, 10, 11]";
  EXPECT_THROW(fit_prompts(Dataset(problems_, "d"), {}, encoder_, options), UserError);
  std::ofstream(first) << "[4, 130";
  EXPECT_NO_THROW(fit_prompts(Dataset(problems_, "d"), {}, encoder_, options))
      << "a damaged file is not used";
  std::ofstream(root / "model/tokenizer.json") << "another";
  EXPECT_NE(file(), first);
  std::ofstream(root / "model/tokenizer.json") << "one";
  EXPECT_EQ(file(), first);
  for (const char* name : {"config.json", "additional_chat_templates/tool_use.jinja"}) {
    std::filesystem::create_directories((root / "model" / name).parent_path());
    std::ofstream(root / "model" / name) << "{}";
    EXPECT_NE(file(), first) << name;
    std::filesystem::remove(root / "model" / name);
  }
  EXPECT_EQ(file(), first);
  problems_[0].prompt += "b";
  EXPECT_NE(file(), first);
  ::unsetenv("BOUGH_CACHE");
  std::filesystem::remove_all(root);
}

}  // namespace
}  // namespace bough
