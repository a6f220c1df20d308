#include "text/stop_tokens.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/json.h"
#include "text/chat_template.h"

namespace bough {
namespace {

using Ids = std::vector<int32_t>;

// A directory with the tokenizer of `bough init`: <|endoftext|> 256, <|im_start|> 257, <|im_end|> 258.
class StopTokens : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) / str("stop_tokens_", ::getpid());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    write("tokenizer.json", byte_level_tokenizer_json());
    write("config.json", R"({"model_type": "llama", "vocab_size": 300, "eos_token_id": 256})");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void write(const char* name, const std::string& text) const { std::ofstream(folder_ / name) << text; }
  void write_json(const char* name, const Json& json) const { write(name, json.dump()); }
  Ids load() const { return load_stop_tokens(folder_, Tokenizer::load(folder_)); }

  std::filesystem::path folder_;
};

TEST_F(StopTokens, ComeFromGenerationConfigThenConfig) {
  const Json config = {{"eos_token_id", 3}};
  write_json("config.json", config);
  EXPECT_EQ(load_stop_tokens(folder_, std::nullopt), std::vector<int32_t>{3});
  write("generation_config.json", R"({"eos_token_id": [7, 8]})");
  EXPECT_EQ(load_stop_tokens(folder_, std::nullopt), (std::vector<int32_t>{7, 8}));
  write("generation_config.json", R"({"eos_token_id": null})");
  EXPECT_EQ(load_stop_tokens(folder_, std::nullopt), std::vector<int32_t>{3});
  for (const char* bad :
       {"-1", "\"</s>\"", "[1, null]", "1.5", "99999999999", "18446744073709551615", "[[1]]"}) {
    write("generation_config.json", str(R"({"eos_token_id": )", bad, "}"));
    EXPECT_THROW(load_stop_tokens(folder_, std::nullopt), UserError) << bad;
  }
  write("generation_config.json", "{}");
  Json no_stop = config;
  no_stop.erase("eos_token_id");
  write("config.json", no_stop.dump());
  EXPECT_TRUE(load_stop_tokens(folder_, std::nullopt).empty());
}

TEST_F(StopTokens, IncludeTheTokenizersEos) {
  EXPECT_EQ(load(), Ids{256});
  write_json("tokenizer_config.json", Json{{"eos_token", "<|im_end|>"}});
  EXPECT_EQ(load(), (Ids{256, 258}));
  write_json("tokenizer_config.json", Json{{"eos_token", "<|endoftext|>"}});
  EXPECT_EQ(load(), Ids{256});
  write_json("special_tokens_map.json", Json{{"eos_token", {{"content", "<|im_end|>"}, {"lstrip", false}}}});
  EXPECT_EQ(load(), (Ids{256, 258}));
  EXPECT_EQ(load_stop_tokens(folder_, std::nullopt), Ids{256});
}

// A base model: its eos_token ends a text, but the template, which sft teaches, ends turns differently.
TEST_F(StopTokens, IncludeTheTokenThatTheTemplateEndsATurnWith) {
  Json config = {{"eos_token", "<|endoftext|>"}, {"chat_template", std::string(chatml_template())}};
  write_json("tokenizer_config.json", config);
  EXPECT_EQ(load(), (Ids{256, 258}));
  config["chat_template"] = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}";  // ends no turn
  write_json("tokenizer_config.json", config);
  EXPECT_EQ(load(), Ids{256});
  config["chat_template"] = "{{ raise_exception('no') }}";
  write_json("tokenizer_config.json", config);
  EXPECT_EQ(load(), Ids{256});
}

TEST_F(StopTokens, LeaveOutTokensThatTheModelDoesNotHave) {
  write_json("tokenizer_config.json", Json{{"eos_token", "<|im_end|>"}});
  write("config.json", R"({"model_type": "llama", "vocab_size": 257, "eos_token_id": 256})");
  EXPECT_EQ(load(), Ids{256});
}

}  // namespace
}  // namespace bough
