#include "run/trace_store.h"

#include <gtest/gtest.h>

#include <fstream>

#include "base/base_test_util.h"
#include "base/error.h"
#include "report/run_follower.h"

namespace bough {
namespace {

namespace fs = std::filesystem;

// A run's folder that a TraceWriter writes.
class TraceStore : public ::testing::Test {
 protected:
  static ScoredGroup group(uint64_t id, double reward) {
    auto group = std::make_shared<FinishedGroup>();
    group->id = id;
    for (int i = 0; i < 2; ++i) {
      Trajectory row;
      row.group = str("p", id);
      row.input_ids = {1, 2, 3};
      row.loss_mask = {0, 1, 1};
      row.logprobs = {0, -1, -2};
      row.versions = {-1, 4, 5};
      row.reward = reward + i;
      row.prompt = "Q\x1b[2J";
      row.completion = str("answer ", id, "\nof two lines");
      group->samples.push_back(std::move(row));
    }
    return {std::move(group), {}};
  }
  // The step's record as train_batch() makes it.
  static StepRecord record(int64_t step, const std::vector<ScoredGroup>& groups) {
    StepRecord record{.step = step};
    for (const ScoredGroup& scored : groups) {
      record.groups.push_back(scored.group->id);
      for (Trajectory& row : scored.rows()) {
        row.advantage = {static_cast<float>(*row.reward) - 0.5F};
        record.batch.push_back(std::move(row));
      }
    }
    return record;
  }
  std::vector<std::string> ids(const std::vector<int64_t>& steps) const {
    std::vector<std::string> out;
    for (const TraceRecord& one : list_traces(folder(), steps)) out.push_back(one.id());
    return out;
  }
  fs::path folder() const { return folder_.path(); }
  TraceStore() { fs::create_directories(folder() / "rollouts"); }

  TemporaryFolder folder_;
};

TEST_F(TraceStore, AConversationIsStoredOnceAsItWaitsAndAsItWasTrained) {
  TraceWriter writer(folder(), 0);
  writer.add_group(group(7, 0), 1, "");
  writer.add_group(group(8, 2), 1, "");
  writer.add_group(group(9, 4), 1, "filter");
  EXPECT_EQ(list_traced_steps(folder()), std::vector<int64_t>{1});
  EXPECT_EQ(ids({1}), (std::vector<std::string>{"1.1.1", "1.1.2", "1.2.1", "1.2.2", "1.3.1", "1.3.2"}));
  EXPECT_EQ(StepGroups(folder(), 1).read(2)[0].fields.value(kDroppedField, ""), "filter");

  writer.end_step(record(1, {group(7, 0)}));  // the other one waits for step 2
  EXPECT_EQ(ids({1}), (std::vector<std::string>{"1.1.1", "1.1.2", "1.2.1", "1.2.2"}));
  EXPECT_EQ(ids({2}), (std::vector<std::string>{"2.1.1", "2.1.2"}));
  EXPECT_EQ(StepGroups(folder(), 2).read(0)[0].group, "p8");
  writer.end_step(record(2, {group(8, 2)}));
  EXPECT_EQ(list_traced_steps(folder()), (std::vector<int64_t>{1, 2}));
  EXPECT_TRUE(kWaitingFiles.numbers(folder()).empty());
  EXPECT_EQ(StepGroups(folder(), 3).size(), 0u) << "the step in work";
  EXPECT_THROW(StepGroups(folder(), 4), UserError);
}

TEST_F(TraceStore, TheIndexSaysWhatTheFilesHold) {
  TraceWriter writer(folder(), 0);
  writer.add_group(group(3, 7), 1, "equal rewards");
  writer.end_step(record(1, {group(1, 0), group(2, 5)}));
  const std::vector<TraceRecord> by_index = list_traces(folder(), {1});
  fs::remove(folder() / "traces" / "index.jsonl");
  const std::vector<TraceRecord> by_files = list_traces(folder(), {1});
  ASSERT_EQ(by_index.size(), 6u);
  ASSERT_EQ(by_files.size(), 6u);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(by_index[i].id(), by_files[i].id());
    EXPECT_EQ(by_index[i].reward, by_files[i].reward);
    EXPECT_EQ(by_index[i].advantage, by_files[i].advantage);
    EXPECT_EQ(by_index[i].tokens, 2);
    EXPECT_EQ(by_index[i].is_dropped, i >= 4);
    EXPECT_EQ(by_files[i].is_dropped, i >= 4);
  }
  EXPECT_EQ(by_index[3].reward, 6);
  EXPECT_EQ(by_index[3].advantage, 5.5);
  EXPECT_FALSE(by_index[4].advantage);
}

// Whatever follows the step of the checkpoint is made again by the resumed run.
TEST_F(TraceStore, AResumedRunNeitherRepeatsNorLosesAGroup) {
  {
    TraceWriter writer(folder(), 0);
    writer.add_group(group(1, 1), 1, "filter");
    writer.end_step(record(1, {group(2, 2)}));
    writer.add_group(group(3, 3), 2, "filter");  // before the run stops and writes a checkpoint of step 1
    writer.bind_dropped(1);
    writer.add_group(group(4, 4), 2, "filter");  // after the checkpoint's state was taken
    writer.add_group(group(5, 5), 2, "");
    writer.end_step(record(2, {group(5, 5)}));
  }
  cut_traces_after(folder(), 1);
  TraceWriter writer(folder(), 0);
  EXPECT_EQ(list_traced_steps(folder()), std::vector<int64_t>{1});
  const StepGroups groups(folder(), 1);
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups.num_kept(), 1u);
  for (const size_t i : {0, 1, 2}) EXPECT_EQ(groups.read(i)[0].group, str("p", i == 0 ? 2 : i == 1 ? 1 : 3));
  EXPECT_EQ(ids({1}).size(), 6u) << "the index is older than the last dropped group";
  cut_traces_after(folder(), -1);
  EXPECT_FALSE(fs::exists(folder() / "traces"));
}

TEST_F(TraceStore, AnEvaluationStandsBehindItsStepAndIsNoSampleOfTraining) {
  const auto samples = [](double reward) {
    std::vector<Trajectory> rows = group(20, reward).rows();
    const std::vector<Trajectory> more = group(21, reward + 2).rows();
    rows.insert(rows.end(), more.begin(), more.end());
    return rows;
  };
  {
    TraceWriter writer(folder(), 0);
    writer.add_evaluation(0, {{"eval", samples(0)}});
    writer.add_group(group(3, 7), 1, "filter");
    writer.end_step(record(1, {group(1, 0)}));
    writer.add_evaluation(1, {{"eval", samples(4)}, {"eval_sparse", samples(8)}});
    writer.add_evaluation(2, {{"eval", samples(0)}});
  }
  EXPECT_EQ(list_traced_steps(folder()), std::vector<int64_t>{1});
  EXPECT_EQ(kEvaluationFiles.numbers(folder()), (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(ids({1}).size(), 4u);
  const StepGroups groups(folder(), 1);
  ASSERT_EQ(groups.size(), 6u);
  EXPECT_EQ(groups.num_kept(), 1u);
  EXPECT_TRUE(groups.is_dropped(1));
  EXPECT_FALSE(groups.is_dropped(2));
  EXPECT_EQ(groups.first_evaluated(), 2u);
  std::vector<TraceRecord> evaluated = read_traces(folder(), 1, /*evaluation=*/true);
  ASSERT_EQ(evaluated.size(), 8u);
  EXPECT_EQ(evaluated[0].id(), "1.3.1");
  EXPECT_EQ(evaluated[7].reward, 11);
  const std::string text = trace_text(evaluated[7], rows_of(groups, evaluated[7]));
  expect_names(text, {"== 1.6.2 p21: reward 11", "evaluation (eval_sparse)"});
  EXPECT_EQ(StepGroups(folder(), 0).first_evaluated(), 0u) << "step 0 has nothing else";
  cut_traces_after(folder(), 1);
  EXPECT_EQ(kEvaluationFiles.numbers(folder()), (std::vector<int64_t>{0, 1}));
  TraceWriter(folder(), 1).end_step(record(2, {group(5, 5)}));
  EXPECT_TRUE(kEvaluationFiles.numbers(folder()).empty()) << "beyond the bound";
}

TEST_F(TraceStore, BeyondTheBoundTheOldestStepsGo) {
  TraceWriter writer(folder(), 1);
  for (int64_t step = 1; step <= 3; ++step) {
    writer.add_group(group(10, 1), step, "filter");
    writer.end_step(record(step, {group(static_cast<uint64_t>(step), 0)}));
    EXPECT_EQ(list_traced_steps(folder()), std::vector<int64_t>{step}) << "the newest step stays";
  }
}

TEST_F(TraceStore, AnIdNamesItsConversation) {
  TraceWriter writer(folder(), 0);
  writer.end_step(record(12, {group(1, 0), group(2, 5)}));
  TraceRecord one = parse_trace_id("12.2.1");
  const StepGroups groups(folder(), 12);
  const std::vector<Trajectory> rows = rows_of(groups, one);
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].group, "p2");
  EXPECT_EQ(one.reward, 5);
  const std::string text = trace_text(one, rows);
  expect_names(text, {"== 12.2.1 p2: reward 5", "advantage 4.5", "2 tokens", "versions 4 to 5",
                      "[completion] answer 2\n    of two lines\n"});
  EXPECT_EQ(trace_json(one, rows)["rows"][0]["input_ids"], Json({1, 2, 3}));
  TraceRecord none = parse_trace_id("12.2.3");
  EXPECT_THROW(rows_of(groups, none), UserError);
  for (const char* wrong : {"", "12", "12.2", "12.0.1", "12.1.1.", "x.1.1", "12.1.-1", " 12.1.1", "12. 1.1"})
    EXPECT_THROW(parse_trace_id(wrong), UserError) << wrong;
}

}  // namespace
}  // namespace bough
