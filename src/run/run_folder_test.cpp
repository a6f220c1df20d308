#include "run/run_folder.h"

#include <gtest/gtest.h>

#include <fstream>

#include "train/small_model.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

class RunFolderTest : public ::testing::Test {
 protected:
  RunFolderTest() {
    root_ = fs::temp_directory_path() / str("bough_run_folder_", ::getpid());
    fs::remove_all(root_);
    settings_.fileroot = root_.string();
    settings_.model.path = "model";
    settings_.train_dataset.path = "data.jsonl";
    settings_.complete();
  }
  ~RunFolderTest() override { fs::remove_all(root_); }

  fs::path run() const { return run_folder_of(settings_); }
  void write_step(int64_t step) {
    RunFolder folder(settings_);
    folder.open_metrics()->write(step, {{"reward/mean", 0.5}});
    write_rollouts(folder.rollout_file(step), {rollout()});
  }
  static Trajectory rollout() {
    Trajectory out;
    out.group = "g";
    out.input_ids = {1, 2, 3};
    out.loss_mask = {0, 1, 1};
    out.logprobs = {0, -1, -1};
    out.reward = 1.0;
    out.prompt = "what?";
    out.completion = "that";
    return out;
  }
  void checkpoint(int64_t step) {
    const auto model = small_model(at::kFloat);
    const Optimizer optimizer(*model, {}, 10);
    save_run_checkpoint(run(), step, *model, optimizer.snapshot(false), Json::object());
  }

  fs::path root_;
  RunSettings settings_;
};

TEST_F(RunFolderTest, WithoutACheckpointARunStartsOver) {
  write_step(1);
  settings_.seed = 9;  // there is nothing to resume, so other settings are no error
  RunFolder folder(settings_);
  EXPECT_FALSE(folder.checkpoint());
  EXPECT_TRUE(read_metrics(run() / "metrics.jsonl").empty());
  EXPECT_TRUE(folder.steps_with_rollouts().empty());
  for (const auto& entry : fs::directory_iterator(run()))
    EXPECT_FALSE(entry.path().filename().string().starts_with("events.")) << entry.path();
  EXPECT_EQ(load_settings<RunSettings>(run() / "config.yaml").seed, 9);
}

TEST_F(RunFolderTest, ResultsAfterTheCheckpointAreCutOff) {
  { const RunFolder folder(settings_); }
  checkpoint(2);
  for (const int64_t step : {1, 2}) {
    RunFolder folder(settings_);
    folder.open_metrics()->write(step, {});
    write_rollouts(folder.rollout_file(step), {rollout()});
  }
  write_step(3);
  const RunFolder folder(settings_);
  ASSERT_TRUE(folder.checkpoint());
  EXPECT_EQ(folder.checkpoint()->step, 2);
  EXPECT_EQ(folder.steps_with_rollouts(), (std::vector<int64_t>{1, 2}));
  const auto records = read_metrics(run() / "metrics.jsonl");
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records.back().step, 2);
}

TEST_F(RunFolderTest, OnlyHarmlessSettingsMayChange) {
  { const RunFolder folder(settings_); }
  checkpoint(1);
  settings_.total_train_steps = 77;
  settings_.saver.freq_steps = 5;
  { const RunFolder folder(settings_); }
  settings_.seed = 2;
  settings_.actor.optimizer.lr = 0.5;
  try {
    const RunFolder folder(settings_);
    FAIL() << "other settings were taken";
  } catch (const UserError& error) {
    const std::string message = error.what();
    for (const char* part : {"seed", "actor.optimizer.lr", "0.5", "trial_name", "config.yaml"})
      EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
    EXPECT_EQ(message.find("total_train_steps"), std::string::npos) << message;
  }
  // A refusal leaves the files unchanged.
  EXPECT_EQ(load_settings<RunSettings>(run() / "config.yaml").seed, 1);
}

TEST_F(RunFolderTest, AResumedRunWithoutItsSettingsIsReported) {
  { const RunFolder folder(settings_); }
  checkpoint(2);
  fs::remove(run() / "config.yaml");
  ::testing::internal::CaptureStderr();
  { const RunFolder folder(settings_); }
  const std::string warning = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(warning.find("config.yaml is missing: the run continues from step 2"), std::string::npos)
      << warning;
  ::testing::internal::CaptureStderr();
  { const RunFolder folder(settings_); }
  EXPECT_EQ(::testing::internal::GetCapturedStderr().find("missing"), std::string::npos);
}

TEST_F(RunFolderTest, IsLockedWhileItIsUsed) {
  const RunFolder folder(settings_);
  EXPECT_THROW(RunFolder{settings_}, UserError);
}

TEST(RunSettingsTest, AcceptsTheNamesOfAReaL) {
  const auto settings = parse_settings<RunSettings>(
      "actor: {path: m, tree_training_mode: dta, use_decoupled_loss: false}\ncluster: {fileroot: here}\n"
      "train_dataset: {path: d}\n",
      "c.yaml");
  EXPECT_EQ(settings.model.path, "m");
  EXPECT_EQ(settings.fileroot, "here");
  EXPECT_EQ(settings.actor.tree.tree_training_mode, "path");
  EXPECT_FALSE(settings.actor.loss.use_decoupled_loss);
  EXPECT_EQ(parse_settings<RunSettings>(settings_yaml(settings), "again").actor.tree.tree_training_mode,
            "path");
}

TEST(RunSettingsTest, TakesAReaLsKeysOfTreeTraining) {
  const auto tree = [](const std::string& actor) {
    return parse_settings<RunSettings>("train_dataset: {path: d}\nactor: {path: m, " + actor + "}\n",
                                       "c.yaml")
        .actor.tree;
  };
  // The example of AReaL's reference page on tree training, then AReaL's defaults.
  const auto on =
      tree("enable_tree_training: true, pad_to_maximum: true, mb_spec: {max_tokens_per_mb: 8192}");
  EXPECT_EQ(on.strategy(), "auto");
  EXPECT_TRUE(on.pad_to_maximum);
  EXPECT_EQ(tree("enable_tree_training: false, pad_to_maximum: false").strategy(), "dense");
  EXPECT_EQ(tree("enable_tree_training: false, tree_training_mode: disabled").strategy(), "dense");
  EXPECT_EQ(tree("enable_tree_training: true, tree_training_mode: sparse").strategy(), "packed");
  EXPECT_EQ(tree("packer: first_fit_decreasing").packer, "first_fit_decreasing");
  const auto expect_refused = [&](const std::string& actor, const std::string& words) {
    try {
      tree(actor);
      FAIL() << actor;
    } catch (const UserError& error) {
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  };
  expect_refused("enable_tree_training: true, tree_training_mode: disabled",
                 "enable_tree_training is true, but tree_training_mode is dense");
  expect_refused("enable_tree_training: false, tree_training_mode: dta",
                 "enable_tree_training is false, but tree_training_mode is path");
  expect_refused("activation_offload: true, gradient_checkpointing: false",
                 "activation_offload is true, but gradient_checkpointing is false");
  expect_refused("packer: heuristic, tree_training_mode: path",
                 "packer is heuristic, but tree_training_mode path packs no trees");
  expect_refused("packer: heuristic, enable_tree_training: false",
                 "packer is heuristic, but tree_training_mode dense packs no trees");
  expect_refused("packer: fullest", "'actor.packer': got 'fullest', expected one of auto | heuristic");
}

TEST(RunSettingsTest, RefusesSettingsThatCannotLearn) {
  const std::string base = "model: {path: m}\ntrain_dataset: {path: d}\n";
  for (const char* more :
       {"gconfig: {temperature: 0}", "gconfig: {greedy: true}", "actor: {loss: sft}", "trial_name: a/b",
        "evaluator: {n_samples: 4}", "actor: {adv_estimator: rloo}\ngconfig: {n_samples: 1}"}) {
    EXPECT_THROW(parse_settings<RunSettings>(base + more, "c.yaml"), UserError) << more;
  }
  EXPECT_NO_THROW(parse_settings<RunSettings>(base, "c.yaml"));
}

TEST(RunSettingsTest, EveryHarmlessKeyExists) {
  RunSettings settings;
  size_t harmless = 0;
  for (const SettingRow& row : settings_rows(settings)) harmless += is_harmless_change(row.key);
  EXPECT_EQ(harmless, 46u);
}

}  // namespace
}  // namespace bough
