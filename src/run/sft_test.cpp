#include "run/sft.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/file.h"
#include "models/checkpoint.h"
#include "rollout/rollout_test_util.h"
#include "text/stop_tokens.h"
#include "text/tokenizer.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

// A small model with a tokenizer whose tokens are bytes, and examples of one prompt prefix.
class SftTest : public ::testing::Test {
 protected:
  SftTest() {
    root_ = fs::temp_directory_path() / str("bough_sft_", ::getpid());
    fs::remove_all(root_);
    const auto model = small_rollout_model(at::kFloat, 1, small_config(260));
    save_model(root_ / "model", *model, {.generation_config = {{"eos_token_id", 258}}});
    std::ofstream(root_ / "model/tokenizer.json") << byte_level_tokenizer_json();
    write_examples({{"Add: 1+1=", "2"}, {"Add: 1+2=", "3"}, {"Add: 2+2=", "4"}, {"Add: 9+9=", "18"}});
    settings_.model.path = (root_ / "model").string();
    settings_.out = (root_ / "out").string();
    settings_.train_dataset.path = (root_ / "data.jsonl").string();
    settings_.train_dataset.batch_size = 3;
    settings_.optimizer.lr = 1e-3;
  }
  ~SftTest() override { fs::remove_all(root_); }

  void write_examples(const std::vector<std::pair<std::string, std::string>>& examples) const {
    std::ofstream file(root_ / "data.jsonl");
    for (const auto& [prompt, completion] : examples)
      file << Json{{"prompt", prompt}, {"completion", completion}}.dump() << "\n";
  }
  SftSummary run(std::function<bool()> stop = {}) const {
    SftSettings settings = settings_;
    settings.complete();
    return run_sft(settings, {.stop = std::move(stop), .show_progress = false});
  }
  // Asks for a stop before step `steps` of this process.
  static std::function<bool()> stop_at(int64_t& polls, int64_t steps) {
    return [&polls, steps] { return ++polls > steps; };
  }

  fs::path root_;
  SftSettings settings_;
};

TEST_F(SftTest, AnEpochHasEveryExampleOnce) {
  settings_.epochs = 3;
  const SftSummary summary = run();
  EXPECT_EQ(summary.examples, 4);
  EXPECT_EQ(summary.steps, 6) << "a batch of 3 and one of 1, for each epoch";
  EXPECT_EQ(summary.trained_tokens, 3 * (5 + 4)) << "the completions and their stop tokens";
  EXPECT_GT(summary.compression, 1) << "the examples of a batch share a prefix";
}

TEST_F(SftTest, TheLossFallsAndTheTrainedModelIsWritten) {
  settings_.max_steps = 60;
  settings_.train_dataset.batch_size = 4;
  const SftSummary summary = run();
  EXPECT_EQ(summary.steps, 60);
  EXPECT_LT(summary.last_loss, 0.5 * summary.first_loss);
  const auto before = load_model(settings_.model.path, at::kFloat, at::kCPU);
  const auto after = load_model(settings_.out, at::kFloat, at::kCPU);
  EXPECT_FALSE(at::equal(before->parameters()[0]->value, after->parameters()[0]->value));
  EXPECT_TRUE(fs::exists(fs::path(settings_.out) / "tokenizer.json"));
  EXPECT_EQ(load_stop_tokens(settings_.out, std::nullopt), std::vector<int32_t>{258});
}

TEST_F(SftTest, AllMessagesOfTheAssistantAreLearnedInOneBatch) {
  const auto talk = [](const std::vector<const char*>& texts) {
    Json messages = Json::array();
    for (size_t i = 0; i < texts.size(); ++i)
      messages.push_back({{"role", i % 2 == 0 ? "user" : "assistant"}, {"content", texts[i]}});
    return Json{{"messages", messages}}.dump() + "\n";
  };
  std::ofstream(root_ / "model/chat_template.jinja")
      << "{% for m in messages %}{{ m.role[0] + m.content + '<|im_end|>' }}{% endfor %}"
         "{% if add_generation_prompt %}a{% endif %}";
  std::ofstream(root_ / "data.jsonl") << talk({"1", "ab", "2", "cde"}) + talk({"3", "x"});
  settings_.train_dataset.batch_size = 1;
  const SftSummary last = run();
  EXPECT_EQ(last.trained_tokens, 4 + 2) << "cde and x, each with the token that ends the message";
  settings_.learned_messages = "all";
  const SftSummary all = run();
  EXPECT_EQ(all.examples, 2);
  EXPECT_EQ(all.steps, 2) << "a conversation's messages are in one batch";
  EXPECT_EQ(all.trained_tokens, 3 + 4 + 2);
  EXPECT_GT(all.compression, 1.2) << "a message's prompt is the start of the next one's";

  settings_.train_dataset.batch_size = 2;
  settings_.learned_messages = "last";
  std::ofstream(root_ / "data.jsonl") << talk({"1", "ab"}) + talk({"1", "ab", "2", "cde"});
  const double apart = run().first_loss;
  std::ofstream(root_ / "data.jsonl") << talk({"1", "ab", "2", "cde"});
  settings_.learned_messages = "all";
  EXPECT_NEAR(run().first_loss, apart, 1e-6) << "the mean over all learned tokens";
}

TEST_F(SftTest, WithLoraOnlyTheAdapterIsWritten) {
  settings_.max_steps = 2;
  settings_.lora.rank = 4;
  run();
  EXPECT_TRUE(fs::exists(fs::path(settings_.out) / "adapter_model.safetensors"));
  EXPECT_FALSE(fs::exists(fs::path(settings_.out) / "model.safetensors"));
}

TEST_F(SftTest, AStoppedTrainingContinuesWithTheSameBits) {
  settings_.max_steps = 9;
  for (const char* dtype : {"fp32", "bf16"}) {
    settings_.dtype = dtype;
    const fs::path whole_out = root_ / "whole" / dtype, out = root_ / "stopped" / dtype;
    settings_.out = whole_out.string();
    const SftSummary whole = run();
    settings_.out = out.string();
    for (const int64_t steps : {3, 0, 4}) {
      int64_t polls = 0;
      const std::string message = message_of<Interrupted>([&] { run(stop_at(polls, steps)); });
      EXPECT_NE(message.find("of 9; the same command continues"), std::string::npos) << message;
      EXPECT_FALSE(fs::exists(out / "model.safetensors"));
    }
    const SftSummary continued = run();
    EXPECT_EQ(read_file(out / "model.safetensors"), read_file(whole_out / "model.safetensors"));
    EXPECT_EQ(continued.first_loss, whole.first_loss);
    EXPECT_EQ(continued.trained_tokens, whole.trained_tokens);
    EXPECT_EQ(continued.compression, whole.compression);
    EXPECT_FALSE(fs::exists(out / "unfinished"));
  }
}

TEST_F(SftTest, OtherSettingsOrExamplesDoNotContinueATraining) {
  settings_.max_steps = 9;
  settings_.saver.freq_steps = 2;
  int64_t polls = 0;
  EXPECT_THROW(run(stop_at(polls, 3)), Interrupted);
  settings_.saver.freq_steps = 0;  // changes no weight
  settings_.optimizer.lr = 2e-3;
  std::string message = message_of<UserError>([&] { run(); });
  EXPECT_NE(message.find("optimizer.lr: was '0.001', now '0.002'"), std::string::npos) << message;
  settings_.optimizer.lr = 1e-3;
  write_examples({{"Add: 1+1=", "2"}});
  message = message_of<UserError>([&] { run(); });
  EXPECT_NE(message.find("data.jsonl now"), std::string::npos) << message;
  fs::remove_all(root_ / "out/unfinished");
  EXPECT_EQ(run().steps, 9);
}

TEST_F(SftTest, CheckpointsAreWrittenWhileItTrains) {
  settings_.max_steps = 9;
  settings_.saver.freq_steps = 4;
  std::vector<std::string> latest;
  run([&] {
    const fs::path file = root_ / "out/unfinished/latest";
    latest.push_back(fs::exists(file) ? read_file(file) : "");
    return false;
  });
  ASSERT_EQ(latest.size(), 9U);
  EXPECT_EQ(latest[4], "");
  EXPECT_EQ(latest[5], "step_4\n") << "written before step 5";
  EXPECT_EQ(latest[8], "step_4\n");
}

TEST_F(SftTest, AnExampleThatTheModelCannotHoldIsNamed) {
  write_examples({{"Q", "A"}, {std::string(300, 'x'), "y"}});
  const std::string message = message_of<UserError>([&] { run(); });
  EXPECT_NE(message.find("data.jsonl:2: the example has 302 tokens, but at most 256 fit"), std::string::npos)
      << message;
}

TEST_F(SftTest, AnOverlongExampleIsLeftOutOrItsPromptIsCut) {
  write_examples({{"Q", "A"}, {std::string(300, 'x'), "yy"}});
  settings_.train_dataset.overlong_prompts = "drop";
  EXPECT_EQ(run().examples, 1);
  settings_.train_dataset.overlong_prompts = "truncate_left";
  const SftSummary summary = run();
  EXPECT_EQ(summary.examples, 2);
  EXPECT_EQ(summary.trained_tokens, 2 + 3) << "completions stay whole";
  settings_.train_dataset.max_length = 2;
  EXPECT_NE(message_of<UserError>([&] { run(); }).find("its completion alone does not fit"),
            std::string::npos);
}

TEST_F(SftTest, TheModelIsNotOverwritten) {
  settings_.out = settings_.model.path;
  EXPECT_NE(message_of<UserError>([&] { settings_.check(); }).find("is model.path itself"),
            std::string::npos);
  settings_.out.clear();
  EXPECT_NE(message_of<UserError>([&] { settings_.check(); }).find("out is missing"), std::string::npos);
}

}  // namespace
}  // namespace bough
