#include "run/run_view.h"

#include <gtest/gtest.h>

#include <fstream>

#include "base/base_test_util.h"
#include "base/error.h"
#include "base/file.h"
#include "data/rollout_file.h"
#include "report/run_follower.h"
#include "run/run_settings.h"
#include "text/tokenizer.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

TEST(TreeJson, NodesAreRunsOfTheSameSequences) {
  std::vector<Trajectory> rollouts(3);
  rollouts[0].input_ids = {1, 2, 3, 4};
  rollouts[1].input_ids = {1, 2, 5};
  rollouts[2].input_ids = {1, 2};
  rollouts[0].loss_mask = {0, 0, 1, 1};
  rollouts[1].loss_mask = {0, 0, 1};
  rollouts[2].loss_mask = {0, 1};
  std::vector<TokenSpan> sequences;
  for (const Trajectory& rollout : rollouts) sequences.emplace_back(rollout.input_ids);
  const Json tree = tree_json(build_prefix_tree(sequences), rollouts);
  // The heavier child comes first. The first node's second token is trained by the third sequence.
  EXPECT_EQ(dump_line(tree["nodes"]), "[[-1,0,2,3,[1,2]],[0,2,4,1,[2,4]],[0,2,3,1,[2,3]]]");
  EXPECT_EQ(tree["tokens"], 9);
  EXPECT_EQ(tree["tree_tokens"], 5);
  EXPECT_EQ(tree["left_out"], 0);
}

TEST(TreeJson, OfManyNodesThoseOfTheMostSequencesAreGiven) {
  std::vector<Trajectory> rollouts(6000);
  std::vector<TokenSpan> sequences;
  for (size_t i = 0; i < rollouts.size(); ++i) {
    rollouts[i].input_ids = {1, static_cast<int32_t>(2 + i)};
    rollouts[i].loss_mask = {0, 1};
    sequences.emplace_back(rollouts[i].input_ids);
  }
  const Json tree = tree_json(build_prefix_tree(sequences), rollouts);
  EXPECT_EQ(tree["nodes"].size(), 5000u);
  EXPECT_EQ(tree["nodes"][0], Json::parse("[-1,0,1,6000,[]]"));
  EXPECT_EQ(tree["left_out"], 1001);
}

// A run's folder with the rollouts of two groups a step, and a byte-level tokenizer as its model.
class RunViewTest : public ::testing::Test {
 protected:
  RunViewTest() {
    fs::create_directories(folder() / "model");
    fs::create_directories(folder() / "rollouts");
    write_file_atomically(folder() / "model" / "tokenizer.json", byte_level_tokenizer_json());
    RunSettings settings;
    settings.model.path = (folder() / "model").string();
    settings.train_dataset.path = "data.jsonl";
    settings.seed = 17;
    settings.complete();
    write_file_atomically(folder() / "config.yaml", settings_yaml(settings));
    std::ofstream(folder() / "metrics.jsonl") << "{\"step\":1,\"reward/mean\":0.5}\n";
  }
  fs::path folder() const { return folder_.path(); }
  static Trajectory sample(const std::string& group, const std::string& completion) {
    Trajectory out;
    out.group = group;
    out.input_ids = {'Q', ':'};
    out.loss_mask = {0, 0};
    for (const char c : completion) {
      out.input_ids.push_back(static_cast<uint8_t>(c));
      out.loss_mask.push_back(1);
    }
    out.logprobs.assign(out.input_ids.size(), -0.12345F);
    out.versions.assign(out.input_ids.size(), 3);
    out.logprobs[0] = out.logprobs[1] = 0;
    out.versions[0] = out.versions[1] = -1;
    out.reward = 1;
    out.advantage = {0.5F};
    out.prompt = "Q:";
    out.completion = completion;
    return out;
  }
  void write_step(int64_t step, const std::string& completion, int num_samples = 2) {
    std::vector<Trajectory> rows;
    for (const char* group : {"g", "h"})
      for (int i = 0; i < num_samples; ++i) rows.push_back(sample(group, completion + std::to_string(i)));
    write_rollouts(kTrainedFiles.path(folder(), step), rows);
  }

  TemporaryFolder folder_;
};

TEST_F(RunViewTest, AStepHasItsGroupsWithTokensAndItsTree) {
  write_step(4, "né");
  RunRollouts rollouts(folder());
  const Json step = rollouts.step(4, 0, 1);
  EXPECT_EQ(step["num_groups"], 2);
  ASSERT_EQ(step["groups"].size(), 1u) << "one sample is asked for, and groups are whole";
  EXPECT_EQ(step["groups"][0]["prompt"], "Q:");
  ASSERT_EQ(step["groups"][0]["samples"].size(), 2u);
  const Json& sample = step["groups"][0]["samples"][1];
  EXPECT_EQ(sample["completion"], "né1");
  EXPECT_EQ(sample["num_tokens"], 4);
  EXPECT_EQ(sample["version"], 3);
  EXPECT_EQ(sample["advantage"], 0.5);
  // The character of two bytes belongs to the token that completes it.
  EXPECT_EQ(sample["tokens"]["texts"], Json({"n", "", "é", "1"}));
  EXPECT_EQ(sample["tokens"]["logprobs"][3], -0.123);
  EXPECT_EQ(step["tree"]["sequences"], 4);
  EXPECT_EQ(rollouts.step(4, 1, 9)["groups"][0]["name"], "h");
  EXPECT_FALSE(rollouts.step(4, 1, 9).contains("tree"));
  EXPECT_TRUE(rollouts.step(5, 0, 9)["groups"].empty()) << "the step in work";
  EXPECT_THROW(rollouts.step(6, 0, 9), UserError);
}

TEST_F(RunViewTest, SettingsThatDifferFromTheirDefaultsAreNamed) {
  const Json about = about_run(folder());
  std::string keys;
  for (const Json& row : about["settings"]) keys += row[0].get<std::string>() + " ";
  EXPECT_NE(keys.find("seed "), std::string::npos) << keys;
  EXPECT_EQ(keys.find("gconfig.n_samples "), std::string::npos) << keys;
  write_file_atomically(folder() / "config.yaml", "seeed: 1\n");
  EXPECT_NE(about_run(folder())["settings_error"].get<std::string>().find("seeed"), std::string::npos);
}

Json data_of(const std::string& page) {
  const size_t begin = page.find("id=\"data\">") + 10;
  return Json::parse(page.substr(begin, page.find("</script>", begin) - begin));
}

TEST_F(RunViewTest, AReportHasTheLastSamplesAndSomeOfTheFirstStep) {
  for (int64_t step = 1; step <= 9; ++step) write_step(step, str("at ", step, " "), 16);
  const Json data = data_of(run_report(folder()));
  int64_t samples = 0;
  std::string steps;
  for (const auto& [key, step] : data["saved"].items()) {
    steps += key + " ";
    for (const Json& group : step["groups"]) samples += std::ssize(group["samples"]);
  }
  EXPECT_EQ(steps, "0/1 0/4 0/5 0/6 0/7 0/8 0/9 ");
  EXPECT_GE(samples, kMostReportSamples);
  EXPECT_LT(samples, kMostReportSamples + 16);
  EXPECT_EQ(data["runs"][0]["curves"]["reward/mean"]["values"], Json({0.5}));
  EXPECT_NE(data["runs"][0]["config"].get<std::string>().find("seed: 17"), std::string::npos);
  EXPECT_THROW(run_report(folder() / "config.yaml"), UserError);
}

TEST_F(RunViewTest, OnlyARunsFolderIsShown) {
  EXPECT_EQ(view_of_run(folder()).folder, folder());
  for (const char* wrong : {"none", "config.yaml", "rollouts"})
    EXPECT_THROW(view_of_run(folder() / wrong), UserError) << wrong;
}

TEST_F(RunViewTest, AReportOfLongSamplesStaysBelowItsBound) {
  for (int64_t step = 1; step <= 12; ++step) write_step(step, std::string(60'000, '<'), 16);
  const std::string page = run_report(folder());
  EXPECT_LT(std::ssize(page), kMostReportBytes);
  EXPECT_GE(data_of(page)["saved"].size(), 2u);
}

}  // namespace
}  // namespace bough
