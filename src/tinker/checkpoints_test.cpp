#include "tinker/checkpoints.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "serve/api.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

class CheckpointsTest : public testing::Test {
 protected:
  CheckpointsTest() { remove_tree(folder_); }
  ~CheckpointsTest() override { remove_tree(folder_); }
  const fs::path folder_ = fs::path(testing::TempDir()) / str("bough_checkpoints_", getpid());
};

void write_adapter(const fs::path& folder) {
  write_file_atomically(folder / "adapter_config.json",
                        R"({"r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "lm_head"]})");
}

TEST_F(CheckpointsTest, AreListedFoundAndRemoved) {
  const Checkpoints checkpoints(folder_ / "store");
  const CheckpointName name = Checkpoints::checked("session-1:train:0", "weights", "step-1");
  checkpoints.publish(name, {.ttl_seconds = 7200, .user_metadata = {{"note", "x"}}}, write_adapter);
  EXPECT_EQ(name.path(), "tinker://session-1:train:0/weights/step-1");
  EXPECT_EQ(checkpoints.existing(name.path(), "weights", "path").name, "step-1");
  const Json list = checkpoints.list("session-1:train:0");
  ASSERT_EQ(list.size(), 1U);
  EXPECT_EQ(list[0]["checkpoint_id"], "weights/step-1");
  EXPECT_EQ(list[0]["checkpoint_type"], "training");
  EXPECT_EQ(list[0]["user_metadata"]["note"], "x");
  EXPECT_TRUE(list[0].contains("expires_at"));
  checkpoints.set_ttl(name, {});
  EXPECT_FALSE(checkpoints.list("session-1:train:0")[0].contains("expires_at"));
  EXPECT_EQ(checkpoints.adapter(name).rank, 4);
  checkpoints.remove(name);
  EXPECT_EQ(checkpoints.list("session-1:train:0").size(), 0U);
  EXPECT_THROW(checkpoints.existing(name.path(), "", "path"), ApiError);
}

TEST_F(CheckpointsTest, GoWhenTheyHaveExpired) {
  const Checkpoints checkpoints(folder_);
  const CheckpointName stays{"r", "weights", "stays"}, goes{"r", "sampler_weights", "goes"};
  checkpoints.publish(stays, {.ttl_seconds = 3600, .user_metadata = nullptr}, write_adapter);
  checkpoints.publish(goes, {.ttl_seconds = -1, .user_metadata = nullptr}, write_adapter);
  checkpoints.remove_expired();
  EXPECT_TRUE(fs::exists(checkpoints.folder(stays)));
  EXPECT_FALSE(fs::exists(checkpoints.folder(goes)));
}

TEST_F(CheckpointsTest, SnapshotsHaveNoNameAndGoWithTheirSession) {
  const Checkpoints checkpoints(folder_);
  const CheckpointName snapshot = Checkpoints::snapshot("r", 3), named{"r", "sampler_weights", "snapshot-3"};
  for (const CheckpointName& name : {snapshot, named}) checkpoints.publish(name, {}, write_adapter);
  EXPECT_EQ(checkpoints.list("r").size(), 1U);
  EXPECT_THROW(checkpoints.existing(snapshot.path(), "", "path"), ApiError);
  checkpoints.end_run("r", 7);
  EXPECT_FALSE(fs::exists(checkpoints.folder(snapshot)));
  EXPECT_TRUE(fs::exists(checkpoints.folder(named)));
}

TEST_F(CheckpointsTest, ARunBelongsToItsTenantAndGoesIfItSavedNothing) {
  const Checkpoints checkpoints(folder_);
  for (const char* const run : {"saved", "empty"})
    checkpoints.begin_run(run, {{"tenant", "anna"}, {"rank", 4}});
  checkpoints.begin_run("saved", {{"tenant", "bob"}});  // as when create_model is sent again
  checkpoints.begin_run("other", {{"tenant", "bob"}});
  const CheckpointName name{"saved", "external_weights", "x"};
  checkpoints.publish(name, {}, write_adapter);
  for (const char* const run : {"saved", "empty"}) checkpoints.end_run(run, 7);
  EXPECT_EQ(checkpoints.runs("anna"), std::vector<std::string>{"saved"});
  EXPECT_EQ(checkpoints.run("saved", "anna").value()["time"], 7);
  for (const std::string run : {"saved", "empty", "..", "", "none"})
    EXPECT_FALSE(checkpoints.run(run, "bob")) << run;
  EXPECT_EQ(checkpoints.list("saved")[0]["checkpoint_type"], "external");
  EXPECT_EQ(checkpoints.files(name).size(), 1U) << "without checkpoint.json";
}

TEST_F(CheckpointsTest, OtherTenantsReadOnlyWhatIsPublic) {
  const Checkpoints checkpoints(folder_);
  checkpoints.begin_run("r", {{"tenant", "anna"}});
  const CheckpointName name{"r", "weights", "x"};
  checkpoints.publish(name, {}, write_adapter);
  checkpoints.check_readable(name.path(), "anna", "path");
  const auto refusal = [&](const std::string& path) -> std::string {
    try {
      checkpoints.check_readable(path, "bob", "path");
      return "";
    } catch (const ApiError& error) {
      return error.what();
    }
  };
  EXPECT_NE(refusal("tinker://r/weights/x").find("there is no such checkpoint"), std::string::npos);
  EXPECT_NE(refusal("tinker://r/weights/y").find("there is no such checkpoint"), std::string::npos);
  EXPECT_THROW(checkpoints.set_public(name, false), ApiError);
  checkpoints.set_public(name, true);
  EXPECT_EQ(refusal(name.path()), "");
  EXPECT_EQ(checkpoints.list("r")[0]["public"], true);
  EXPECT_THROW(checkpoints.set_public(name, true), ApiError);
  checkpoints.set_public(name, false);
  EXPECT_NE(refusal(name.path()), "");
}

TEST_F(CheckpointsTest, WhatAKilledServiceHasLeftGoes) {
  const Checkpoints checkpoints(folder_);
  const CheckpointName gone = Checkpoints::snapshot("gone", 3), live = Checkpoints::snapshot("live", 3),
                       saved{"gone", "weights", "saved"};
  for (const CheckpointName& name : {gone, live, saved}) checkpoints.publish(name, {}, write_adapter);
  const fs::path half = folder_ / "live" / "weights" / ".name.new";
  make_directories(half);
  write_file_atomically(folder_ / "a file", "");
  checkpoints.remove_leftovers({"live"});
  EXPECT_FALSE(fs::exists(checkpoints.folder(gone)));
  EXPECT_FALSE(fs::exists(half));
  EXPECT_TRUE(fs::exists(checkpoints.folder(live)));
  EXPECT_TRUE(fs::exists(checkpoints.folder(saved)));
}

TEST_F(CheckpointsTest, ACheckpointKnowsTheRequestThatMadeIt) {
  const Checkpoints checkpoints(folder_);
  const CheckpointName name{"r", "weights", "x"};
  EXPECT_EQ(checkpoints.made_by(name), "");
  checkpoints.publish(name, {.ttl_seconds = {}, .user_metadata = nullptr, .request = "r/3"}, write_adapter);
  EXPECT_EQ(checkpoints.made_by(name), "r/3");
}

TEST_F(CheckpointsTest, NoNameLeavesTheFolder) {
  const Checkpoints checkpoints(folder_ / "store");
  make_directories(folder_ / "weights" / "secret");
  write_adapter(folder_ / "weights" / "secret");
  for (const std::string name : {"..", ".", "", "a/b", "../secret", "a\\b", ".hidden", "a\nb", "\xff"}) {
    EXPECT_THROW(Checkpoints::checked("run", "weights", name), ApiError) << name;
    EXPECT_THROW(Checkpoints::checked(name, "weights", "x"), ApiError) << name;
  }
  for (const std::string path :
       {"tinker://../weights/secret", "tinker://run/../secret", "tinker://run/weights/../../weights/secret",
        "/etc/passwd", "tinker://run/weights", "tinker://run/weights/x/y", "tinker://run/optimizer/x",
        "tinker:///weights/secret"})
    EXPECT_THROW(checkpoints.existing(path, "", "path"), ApiError) << path;
}

}  // namespace
}  // namespace bough
