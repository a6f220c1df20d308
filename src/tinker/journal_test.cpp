#include "tinker/journal.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "base/base_test_util.h"
#include "base/error.h"
#include "base/file.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

const Json kBaseOfTest = {{"directory", "/models/m"}, {"dtype", "Float"}, {"files", {{"config.json", 1}}}};
const std::string kSession = "session-a", kId = "session-a:train:0";
constexpr std::string_view kSnapshotText = "weights after ";

class JournalTest : public testing::Test {
 protected:
  JournalTest() {
    remove_tree(folder_);
    journal_ = std::make_unique<Journal>(folder_, true, kBaseOfTest);
    journal_->add_session(kSession, {{"tenant", "anna"}});
    ModelStart start{.adapter = {}, .seed = 7, .path = "", .with_optimizer = false};
    start.adapter.rank = 4;
    start.adapter.targets = {{"q_proj"}, {"lm_head"}};
    journal_->add_model(kId, start);
  }
  ~JournalTest() override { remove_tree(folder_); }

  void accept(int64_t seq_id, const std::string& body = "body") {
    journal_->accept(kId, seq_id, {"forward_backward", "application/json", body});
  }
  // Its answers are "answer N", but not that of `dropped`.
  void step(int64_t seq_id, int64_t dropped = -1) {
    journal_->step(
        kId, seq_id,
        [&](const fs::path& folder) {
          write_file_atomically(folder / "weights", str(kSnapshotText, seq_id));
        },
        [&](int64_t each) -> std::shared_ptr<const FutureResult> {
          if (each == dropped) return nullptr;
          return std::make_shared<const FutureResult>(answer(each));
        });
  }
  static FutureResult answer(int64_t seq_id) {
    return {.json = {{"answer", seq_id}, {"float", 0.1F}},
            .protobuf = std::string("a\0\xff", 3) + std::to_string(seq_id)};
  }
  // The model as the service finds it when it starts again.
  RestoredModel restored() {
    journal_ = std::make_unique<Journal>(folder_, true, kBaseOfTest);
    std::vector<RestoredSession> sessions = journal_->restore();
    EXPECT_EQ(sessions.size(), 1U);
    EXPECT_EQ(sessions.at(0).models.size(), 1U);
    return std::move(sessions.at(0).models.at(0));
  }
  std::string snapshot_text() const { return read_file(*journal_->snapshot(kId) / "weights"); }
  template <class Map>
  static std::vector<int64_t> keys(const Map& map) {
    std::vector<int64_t> all;
    for (const auto& [key, value] : map) all.push_back(key);
    return all;
  }
  using Ids = std::vector<int64_t>;

  const fs::path folder_ = fs::path(testing::TempDir()) / str("bough_journal_", getpid());
  const fs::path model_folder_ = folder_ / kSession / kId;
  std::unique_ptr<Journal> journal_;
};

TEST_F(JournalTest, RequestsThatNoStepCoversAreRunAgain) {
  accept(1);
  accept(2, "two");
  accept(2, "sent again");
  const RestoredModel model = restored();
  EXPECT_EQ(model.failure, "");
  EXPECT_EQ(model.next, 1);
  EXPECT_EQ(model.start.adapter.rank, 4);
  EXPECT_EQ(model.start.adapter.targets.back().name, "lm_head");
  EXPECT_EQ(model.start.seed, 7U);
  EXPECT_EQ(keys(model.requests), (Ids{1, 2}));
  EXPECT_EQ(model.requests.at(2).body, "two");
  EXPECT_EQ(model.requests.at(2).route, "forward_backward");
  EXPECT_EQ(model.requests.at(2).content_type, "application/json");
  EXPECT_FALSE(journal_->snapshot(kId));
}

TEST_F(JournalTest, AStepCoversTheRequestsBeforeIt) {
  for (int64_t i = 1; i <= 4; ++i) accept(i);
  step(3, /*dropped=*/1);
  accept(2, "sent again, after the step");
  const RestoredModel model = restored();
  EXPECT_EQ(model.next, 4);
  EXPECT_EQ(keys(model.requests), Ids{4});
  EXPECT_EQ(keys(model.answers), (Ids{2, 3})) << "1 was no longer kept";
  EXPECT_EQ(model.answers.at(3).as_json(), answer(3).json);
  EXPECT_EQ(model.answers.at(3).protobuf, answer(3).protobuf);
  EXPECT_EQ(snapshot_text(), str(kSnapshotText, 3));
}

TEST_F(JournalTest, AnswersOfEarlierStepsStayUntilTheyAreNoLongerKept) {
  for (const int64_t seq_id : {2, 4, 6}) step(seq_id);
  EXPECT_EQ(keys(restored().answers), (Ids{1, 2, 3, 4, 5, 6}));
  journal_->drop_answers([](const std::string&, int64_t seq_id) { return seq_id == 3; });
  EXPECT_EQ(keys(restored().answers), (Ids{3, 4, 5, 6})) << "a file stays while one of its answers is kept";
  EXPECT_EQ(snapshot_text(), str(kSnapshotText, 6));
  int64_t steps = 0;
  for (const auto& entry : fs::directory_iterator(model_folder_))
    steps += entry.path().filename().string().starts_with("step-");
  EXPECT_EQ(steps, 1) << "one snapshot is on the disk";
}

TEST_F(JournalTest, WhatTrainsNothingIsDoneAtOnceAndAGradientWithItsStep) {
  for (int64_t i = 1; i <= 3; ++i) accept(i);
  journal_->answered(kId, 2, answer(2));  // a forward between two forward_backward
  RestoredModel model = restored();
  EXPECT_EQ(model.next, 1);
  EXPECT_EQ(keys(model.requests), (Ids{1, 3}));
  EXPECT_EQ(keys(model.answers), Ids{2});
  step(3);
  model = restored();
  EXPECT_EQ(keys(model.answers), (Ids{1, 2, 3}));
  EXPECT_TRUE(model.requests.empty());
}

TEST_F(JournalTest, AModelThatTakesNoStepsKeepsNoOldAnswers) {
  for (int64_t i = 1; i <= 5; ++i) {
    accept(i);
    if (i != 4) journal_->answered(kId, i, answer(i));
  }
  journal_->drop_answers([](const std::string&, int64_t) { return false; });
  const RestoredModel model = restored();
  EXPECT_EQ(model.next, 4);
  EXPECT_EQ(keys(model.answers), Ids{5}) << "it marks 5 as done while 4 is not";
  EXPECT_EQ(keys(model.requests), Ids{4});
  step(4);
  journal_->drop_answers([](const std::string&, int64_t) { return false; });
  EXPECT_EQ(restored().next, 6);
}

TEST_F(JournalTest, AFailedStepLeavesTheLastOne) {
  accept(1);
  step(1);
  accept(2);
  accept(3);
  const auto fails = [](const fs::path& folder) {
    write_file_atomically(folder / "weights", "half");
    throw IoError("no space left on device");
  };
  EXPECT_THROW(journal_->step(kId, 3, fails, [](int64_t) { return nullptr; }), IoError);
  EXPECT_EQ(snapshot_text(), str(kSnapshotText, 1));
  EXPECT_EQ(keys(restored().requests), (Ids{2, 3}));
  step(3);
  EXPECT_EQ(snapshot_text(), str(kSnapshotText, 3));
}

TEST_F(JournalTest, AFullDiskFailsARequestOrAStepAndLeavesTheRest) {
  accept(1);
  step(1);
  const std::string body(10'000, 'x');
  {
    const FileSizeLimit limit(4000);
    EXPECT_THROW(accept(2, body), IoError);
    EXPECT_THROW(journal_->step(
                     kId, 2, [&](const fs::path& folder) { write_file_atomically(folder / "weights", body); },
                     [](int64_t) { return nullptr; }),
                 IoError);
    EXPECT_THROW(
        journal_->step(
            kId, 2, [](const fs::path&) {},
            [&](int64_t) {
              return std::make_shared<const FutureResult>(FutureResult{.json = body, .protobuf = ""});
            }),
        IoError);
  }
  const RestoredModel model = restored();
  EXPECT_EQ(model.next, 2);
  EXPECT_TRUE(model.requests.empty());
  EXPECT_EQ(snapshot_text(), str(kSnapshotText, 1));
  accept(2, body);
  EXPECT_EQ(restored().requests.at(2).body, body);
}

TEST_F(JournalTest, AKillAtAnyPointOfAStepLeavesTheOldOrTheNewOne) {
  accept(1);
  step(1);
  accept(2);
  step(2);
  // Killed before the new step was published, or before the old one was removed.
  fs::create_directories(model_folder_ / ".step");
  write_file_atomically(model_folder_ / ".step" / "weights", "half");
  fs::create_directories(model_folder_ / "step-1");
  fs::rename(model_folder_ / "answers-1", model_folder_ / "step-1" / "answers");
  write_file_atomically(model_folder_ / "request-2.new", "half");
  const RestoredModel model = restored();
  EXPECT_EQ(model.next, 3);
  EXPECT_EQ(keys(model.answers), (Ids{1, 2}));
  EXPECT_TRUE(model.requests.empty());
  for (const char* name : {".step", "step-1", "request-2.new"})
    EXPECT_FALSE(fs::exists(model_folder_ / name)) << name;
}

TEST_F(JournalTest, ATornRequestIsLostAndTheOthersStay) {
  for (int64_t i = 1; i <= 3; ++i) accept(i, std::string(1000, 'x'));
  const std::string whole = read_file(model_folder_ / "request-2");
  for (const size_t length : {size_t{0}, size_t{20}, whole.size() / 2, whole.size() - 1}) {
    write_file_atomically(model_folder_ / "request-2", whole.substr(0, length));
    EXPECT_EQ(keys(restored().requests), (Ids{1, 3})) << length;
  }
  accept(2, "sent again");
  EXPECT_EQ(restored().requests.at(2).body, "sent again");
  std::string changed = whole;
  changed[whole.size() - 5] = 'y';
  write_file_atomically(model_folder_ / "request-2", changed);
  EXPECT_EQ(keys(restored().requests), (Ids{1, 3}));
}

TEST_F(JournalTest, DamagedSettingsOfAModelAreItsFailure) {
  accept(1);
  for (const char* text : {"", "{", "{\"rank\": \"four\"}", "[]"}) {
    write_file_atomically(model_folder_ / "model.json", text);
    const std::string failure = restored().failure;
    expect_names(failure, {kId, "model.json", "damaged"});
  }
  accept(1);
  step(1);  // nothing is written for it
  EXPECT_FALSE(fs::exists(model_folder_ / "step-1"));
}

TEST_F(JournalTest, FullFineTuningIsOnlyRecorded) {
  journal_->remove_session(kSession);
  journal_->add_session(kSession, {{"tenant", "anna"}});
  journal_->add_model(kId, {});
  accept(1);
  step(1);
  const RestoredModel model = restored();
  EXPECT_EQ(model.start.adapter.rank, 0);
  EXPECT_TRUE(model.requests.empty() && model.answers.empty());
  EXPECT_FALSE(journal_->snapshot(kId));
}

TEST_F(JournalTest, AModelThatWasNeverAcknowledgedIsForgotten) {
  fs::create_directories(folder_ / kSession / "session-a:train:1");
  EXPECT_EQ(restored().id, kId);
  EXPECT_FALSE(fs::exists(folder_ / kSession / "session-a:train:1"));
}

TEST_F(JournalTest, AnotherBaseIsRefusedWhileThereAreSessions) {
  Json moved = kBaseOfTest, other = kBaseOfTest;
  moved["directory"] = "/elsewhere/m";
  other["files"] = {{"config.json", 2}};
  EXPECT_NO_THROW(Journal(folder_, true, moved));
  EXPECT_THROW(Journal(folder_, true, other), UserError);
  journal_->remove_session(kSession);
  EXPECT_NO_THROW(Journal(folder_, true, other));
}

TEST_F(JournalTest, AnIdentityTellsFilesOfOneSizeApart) {
  const fs::path base = folder_ / "base";
  fs::create_directories(base);
  write_file_atomically(base / "config.json", "{}");
  std::string weights(5'000'000, 'w');
  const auto identity = [&](const std::string& dtype = "Float") {
    write_file_atomically(base / "model.safetensors", weights);
    return base_identity(base, dtype);
  };
  const Json first = identity();
  EXPECT_EQ(identity(), first);
  EXPECT_NE(identity("BFloat16"), first);
  weights[2'500'001] = 'x';
  EXPECT_NE(identity(), first);
}

TEST_F(JournalTest, AJournalThatIsOffWritesNothing) {
  journal_ = std::make_unique<Journal>(folder_, false, kBaseOfTest);
  EXPECT_FALSE(fs::exists(folder_)) << "what an earlier service has left goes";
  journal_->add_session(kSession, {{"tenant", "anna"}});
  journal_->add_model(kId, {});
  accept(1);
  step(1);
  EXPECT_FALSE(fs::exists(folder_));
  EXPECT_TRUE(journal_->restore().empty());
}

TEST_F(JournalTest, SamplersComeBack) {
  journal_->add_sampler(kSession, "session-a:sample:0", {{"seq_id", 5}});
  journal_ = std::make_unique<Journal>(folder_, true, kBaseOfTest);
  const std::vector<RestoredSession> sessions = journal_->restore();
  EXPECT_EQ(sessions.at(0).description["tenant"], "anna");
  ASSERT_EQ(sessions.at(0).samplers.size(), 1U);
  EXPECT_EQ(sessions.at(0).samplers.at("session-a:sample:0")["seq_id"], 5);
}

}  // namespace
}  // namespace bough
